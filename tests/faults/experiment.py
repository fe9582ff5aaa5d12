"""One fault on a live run: committed, watched, repaired where an operator would, and accounted."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from dataclasses import dataclass

from benchmarks import procfs
from benchmarks.cores import family
from benchmarks.procfs import send
from faults.books import Books, audit
from faults.inject import Slowness, wait_for_phase
from faults.live import GUEST, LiveRun
from faults.plan import OPERATED, Fault
from faults.roles import victims
from faults.watch import POLL_INTERVAL_S, Sight, Watch

logger = logging.getLogger(__name__)
RECOVERY_TIMEOUT_S = 300.0
ORPHANS_TIMEOUT_S = 20.0
OPERATOR_AFTER_S = 3.0  # until somebody starts a dispatcher again
FROZEN_S, FROZEN_WORKER_S, SLOW_S = 5.0, 90.0, 15.0
SETTLING_BATCHES = 3  # of the recovered run, before the next fault


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one fault."""

    fault: Fault
    sight: Sight
    by_hand: tuple[str, ...]  # commands that the operator started again
    last_line: str  # of the trainer, if it ended
    books: Books  # of the run so far
    orphans: int
    problems: tuple[str, ...]
    load: float

    @property
    def recovered_s(self) -> float | None:
        """Until batches were trained again, by as many processes as before."""
        times = (self.sight.goes_on_s, self.sight.whole_s)
        return None if None in times else max(time for time in times if time is not None)


# What a generation dispatcher brings: a worker, and a pool that grades.
GUEST_ROLES = ("generation", "verifier")
GUEST_PLAYERS = (
    *("generation worker", "engine core"),
    *("verifier pool", "verifier container", "verifier server"),
)


def settled(run: LiveRun) -> None:
    """Have the run as it is meant to be, before the next fault."""
    run.revive()
    run.wait_for_rows(len(run.rows()) + SETTLING_BATCHES, timeout_s=RECOVERY_TIMEOUT_S)


def commit(fault: Fault, run: LiveRun, *, generator: random.Random) -> Outcome:
    """Do it, and wait until the run is whole again or has failed to be."""
    watch = Watch(run)
    problems: list[str] = []
    if not wait_for_phase(fault.phase, run, generator=generator):
        problems.append(f"never seen {fault.phase}")
    chosen = _chosen(fault, run, generator=generator)
    if not chosen and fault.action != "join":
        problems.append("nobody plays this role")
    offspring = family(*chosen) if chosen else set()
    watch.begin()
    by_hand = _act(fault, run, watch, chosen)
    _recover(fault, run, watch, by_hand, problems)
    frozen = fault.action in ("SIGSTOP", "slow")
    orphans = 0 if frozen else _count_orphans(offspring)
    sight = watch.sight
    if orphans:
        problems.append(f"{orphans} processes outlive what started them")
    if sight.ended_s is not None and not (fault.ends_run or watch.is_batcher_budget_spent):
        problems.append("the run ended")
    last_line = _last_words(run) if sight.ended_s is not None else ""
    return Outcome(
        fault, sight, tuple(by_hand), last_line, books(run), orphans, tuple(problems),
        os.getloadavg()[0],
    )  # fmt: skip


def books(run: LiveRun) -> Books:
    """Of all batches that have ended so far."""
    rows = run.rows()
    return audit(rows, run.samples(), work=run.shape.work)


def _chosen(fault: Fault, run: LiveRun, *, generator: random.Random) -> tuple[int, ...]:
    if fault.action == "leave":
        command = run.commands[GUEST]
        return (command.pid,) if command.is_running else ()
    return victims(fault.role, run, generator=generator) if fault.action != "join" else ()


def _act(fault: Fault, run: LiveRun, watch: Watch, pids: tuple[int, ...]) -> list[str]:
    """Commit the fault; a freeze and slowness last until noticed, or for as long as they do."""
    if fault.action == "join":
        run.commands[GUEST].start()
        watch.expects(dict.fromkeys(GUEST_ROLES, 1), dict.fromkeys(GUEST_PLAYERS, 1))
    elif fault.action == "leave":
        watch.expects(dict.fromkeys(GUEST_ROLES, -1), dict.fromkeys(GUEST_PLAYERS, -1))
        send(pids, signal.SIGTERM)
    elif fault.action == "slow":
        with Slowness(pids):
            _look_for(SLOW_S, watch)
    elif fault.action == "SIGSTOP":
        is_worker = "worker" in fault.role or fault.role in ("engine core", "verifier server")
        send(pids, signal.SIGSTOP)
        try:
            _look_for(FROZEN_WORKER_S if is_worker else FROZEN_S, watch, until_noticed=is_worker)
        finally:
            send(pids, signal.SIGCONT)
    else:
        send(pids, signal.Signals[fault.action])
    return []


def _look_for(seconds: float, watch: Watch, *, until_noticed: bool = False) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if watch.look(is_frozen=True).detected_s is not None and until_noticed:
            time.sleep(1.0)  # so that it is really replaced before it wakes
            return
        time.sleep(POLL_INTERVAL_S)


def _recover(
    fault: Fault, run: LiveRun, watch: Watch, by_hand: list[str], problems: list[str]
) -> None:
    """Look until the run is whole; start again, as an operator would, what has ended."""
    deadline = time.monotonic() + RECOVERY_TIMEOUT_S
    while time.monotonic() < deadline:
        sight = watch.look()
        is_over = sight.ended_s is not None or not fault.ends_run
        if is_over and sight.goes_on_s is not None and sight.whole_s is not None:
            return
        ended = [name for name in run.dispatchers if not run.commands[name].is_running]
        if sight.ended_s is not None and not run.commands["trainer"].is_running:
            ended.append("trainer")
        for name in ended:
            last = f"{name} ended: {run.commands[name].last_line()[:200]}"
            if name in by_hand:
                problems.append(f"started again, {last}")
                return
            if name != "trainer" and fault.role not in (*OPERATED, "machine"):
                problems.append(last)
        if ended:
            _look_for(OPERATOR_AFTER_S, watch)
            by_hand += run.start_again()
        time.sleep(POLL_INTERVAL_S)
    problems.append(f"not whole within {RECOVERY_TIMEOUT_S:g} s")


def _last_words(run: LiveRun) -> str:
    """Of the trainer's life before the present one."""
    logs = sorted(run.commands["trainer"].log.parent.glob("trainer.*.log"), key=_number)
    text = logs[-2 if len(logs) > 1 else -1].read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def _number(log: os.PathLike[str]) -> int:
    return int(os.fspath(log).rsplit(".", 2)[-2])


def _count_orphans(offspring: set[int]) -> int:
    """How many of a victim's descendants still run when all have had time to end."""
    births = {pid: procfs.birth(pid) for pid in offspring}
    deadline = time.monotonic() + ORPHANS_TIMEOUT_S
    while time.monotonic() < deadline:
        left = [p for p, born in births.items() if procfs.is_running(p) and procfs.birth(p) == born]
        if not left:
            return 0
        time.sleep(POLL_INTERVAL_S)
    return len(left)
