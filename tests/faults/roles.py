"""Which processes of a run play which role, found from outside."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks import procfs
from faults.live import GUEST, LiveRun

TITLES: dict[str, str | tuple[str, ...]] = {
    "generation worker": ("ray::GenerationWorker", "ray::ScriptedWorker"),
    "engine core": "VLLM::EngineCore",
    "logprob worker": "ray::LogprobWorker",
    "verifier pool": "ray::VerifierPool",
    "controller": "ray::Controller",
}
# Each is the parent of the next, the pool that of the first.
GRADERS = ("verifier container", "verifier server", "verifier request")


def cast(run: LiveRun) -> dict[str, list[int]]:
    """Process ids by role."""
    living = run.living()
    titles = {pid: procfs.command_line(pid) for pid in living}
    found = {
        role: sorted(pid for pid in living if titles[pid].startswith(title))
        for role, title in TITLES.items()
    }
    ancestors = set(found["verifier pool"])
    for role in GRADERS:
        ancestors = {child for pid in ancestors for child in procfs.children(pid)} & living
        found[role] = sorted(ancestors)
    ranks = _ranks(run)
    found |= {f"trainer rank {rank}": [pid] for rank, pid in ranks.items()}
    return found


def census(run: LiveRun) -> dict[str, int]:
    """How many play each role."""
    return {role: len(pids) for role, pids in cast(run).items()}


def victims(role: str, run: LiveRun, *, generator: random.Random) -> tuple[int, ...]:
    """Whom a fault of `role` befalls; nobody when the role is not played."""
    if role == "machine":
        return tuple(run.living())
    if role == "torchrun":
        return (run.commands["trainer"].pid,)
    if role.endswith("dispatcher"):
        name = _dispatcher(role.removesuffix(" dispatcher"), run, generator=generator)
        return (run.commands[name].pid,) if name else ()
    players = cast(run)
    if role == "node of workers":
        return (*players["generation worker"], *players["engine core"], *players["logprob worker"])
    alive = players.get(role, [])
    return (generator.choice(alive),) if alive else ()


def _dispatcher(mode: str, run: LiveRun, *, generator: random.Random) -> str:
    names = [name for name in run.dispatchers if name.startswith(mode)]
    running = [name for name in names if run.commands[name].is_running]
    return generator.choice(running) if running else ""


def guest(run: LiveRun) -> Sequence[int]:
    """The dispatcher that came in mid-run."""
    command = run.commands[GUEST]
    return (command.pid,) if command.is_running else ()


def _ranks(run: LiveRun) -> dict[int, int]:
    found: dict[int, int] = {}
    for pid in run.family_of("trainer"):
        line, variables = procfs.command_line(pid), procfs.variables(pid)
        if "trainer_core.py" in line and "torch.distributed.run" not in line:
            rank = int(variables.get("RANK", "0"))
            found[rank] = min(pid, found.get(rank, pid))  # the first: others are its helpers
    return found
