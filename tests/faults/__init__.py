"""Faults on real runs: every role killed, frozen, slowed or ended, at chosen moments.

    plan ──fault──▶ inject (phase, victim, signal) ──▶ watch (detected? goes on? whole again?)
                                                        └──▶ books: samples lost, ordinals doubled

One run bears many faults, one after the other; a fault that ends the trainer is followed by the
same command line, which has to go on where the last checkpoint was.
"""
