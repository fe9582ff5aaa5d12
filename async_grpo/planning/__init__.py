"""Predicts a run before it starts: the memory of every role, the time of a step, the best split.

    asked  ─▶ bills      the memory of each role, a formula for each line, and whether it fits
    asked  ─▶ rates      how fast each role is by peaks; measured: by a file, or by earlier runs
    rates  ─▶ service    the run on a virtual clock: registries and batcher are the real ones,
                         workers and ranks take as long as their rates say
    service ─▶ search    the best split of the devices, and the best staleness

docs/planning.md states what is assumed, docs/scaling.md what is simulated.
"""
