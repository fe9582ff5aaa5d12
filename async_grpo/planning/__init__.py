"""What a run takes, before it is started: memory of every role, time of a step, who gets devices.

    asked  ─▶ bills      what each role holds, a line and a formula each, and whether it fits
    asked  ─▶ rates      how fast each role is by peaks; known: given, measured in earlier runs
    rates  ─▶ service    the run on a virtual clock: registries and batcher are the service's own,
                         workers and ranks take as long as their rates say
    service ─▶ search    which split of the devices, and which staleness

docs/planning.md says what is assumed, docs/scaling.md what is simulated.
"""
