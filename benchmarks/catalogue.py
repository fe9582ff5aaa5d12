"""The benchmarks of `make benchmarks`, in the order in which they run."""

from __future__ import annotations

NAMES = (
    "packing",  # token budget used, imbalance and fillers, by packing rule
    "control_plane",  # the controller's CPU: a sample, a turn, a ping
    "scaling",  # devices on paper, by what control_plane has found: which part saturates first
    "control_memory",  # of the control process: over many batches, and with many questions
    "leased_places",  # of engines, idle under groups with a long tail, by what a lease is of
    "episodes",  # with a long tail: what is trained, and what a rule that drops by age would lose
    "concurrent_episodes",  # a thousand at a time: what Python adds to each of their turns
    "weight_sync",  # bytes a second, pause, peak memory, recomputed tokens
    "weight_gather",  # what ranks spend on new weights: standing still, bytes, memory
    "weight_delta",  # bytes: what an update changes of published weights
    "trainer_memory",  # of ranks that load and train, by the bill
    "gateway",  # what HTTP and rendering add to a turn
    "startup",  # command to first optimizer step, by phase
    "staleness",  # what asynchrony buys on two cores
    "learning_curves",  # rewards over wall clock, by staleness
    "distillation",  # teachers: bytes, steps a minute, the recipes beside TRL's
    "plan_truth",  # plans beside real runs: memory of each role, seconds of a step
    "end_to_end",  # against TRL: samples a second, time to a reward
    "gpu",  # one device; a toy size where there is none
    "faults",  # every role killed and frozen: how soon that is noticed and made good
)
# What only the clock of a script or the shape of a computation decides, or is measured as a ratio
# of neighbours within seconds; each has its file in benchmarks/results. Scaling is no less certain,
# but takes many minutes.
GUARDED = ("packing",)
# The files of a benchmark, where not NAME.json alone: any of them will do.
FILES = {"gpu": ("gpu", "gpu_toy")}
