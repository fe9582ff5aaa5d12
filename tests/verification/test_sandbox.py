import asyncio
import os
import time
from pathlib import Path

import pytest
from verifier_processes import Grader, processes, sandbox, verdict_of

from async_grpo.util.errors import ConfigError
from async_grpo.verification.server import GraderServer

pytestmark = pytest.mark.integration

SAMPLE = {"output": "8-2+9=15", "answer": "15", "nums": [2, 9, 8], "target": 15}
TRAPS = """
import os, subprocess, sys, time

def fair(sample, **kwargs):
    return {"reward": sample["points"]}

def trap(sample, **kwargs):
    kind = sample["kind"]
    if kind == "hang":
        while True: pass
    if kind == "hang in C":
        return {"reward": float(len(str(9 ** 10_000_000)))}
    if kind == "slow once":
        while os.path.exists(sample["flag"]): pass
    if kind == "child":
        subprocess.Popen(["sleep", sample["nap"]])
        time.sleep(60)
    if kind == "memory":
        return {"reward": len(bytearray(3 << 30))}
    if kind == "recursion":
        return trap(sample) | {}
    if kind == "crash":
        os._exit(3)
    if kind == "signal":
        import ctypes; ctypes.string_at(0)
    if kind == "exit":
        sys.exit(4)
    if kind == "raise":
        raise LookupError("no such luck")
    if kind == "once":
        if time.time() < sample["until"]:
            os._exit(3)
    if kind == "column":
        return {"reward": sample["missing"]}
    if kind == "stdin":
        return {"reward": float(sys.stdin.read() == "" and os.read(0, 1) == b"")}
    if kind == "environment":
        return {"reward": float("MY_API_KEY" not in os.environ and "HOME" in os.environ)}
    if kind == "bad reward":
        return sample["result"]
    return {"reward": 1.0}

class Unloadable(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def strange(sample, **kwargs):
    raise Unloadable(1, 2)
"""


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    path = tmp_path_factory.mktemp("traps") / "traps.py"
    path.write_text(TRAPS)
    return str(path)


@pytest.fixture(scope="module")
def grader(traps):
    patch = pytest.MonkeyPatch()
    patch.setenv("MY_API_KEY", "hush")
    grader = Grader(f"{traps}:trap", timeout_s=0.5)
    patch.undo()
    yield grader
    grader.close()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("hang", "--verifier-timeout-s 0.5"),
        ("hang in C", "--verifier-timeout-s 0.5"),
        ("memory", "--verifier-memory-mib 2048"),
        ("recursion", "recurses too deeply"),
    ],
)
def test_an_overrun_that_repeats_is_unscorable(grader, kind, reason):
    assert grader.grade({"kind": "fine"}).reward == 1.0
    verdict = grader.grade({"kind": kind})
    assert (verdict.status, verdict.reward, verdict.cause) == ("unscorable", 0.0, "overrun")
    assert reason in verdict.reason


def test_an_overrun_of_what_was_in_time_before_is_an_error(traps, tmp_path):
    """The adapter has become slow, as a judge that is overloaded: no text is to blame."""
    flag = tmp_path / "slow"

    async def grade():
        async with sandbox(f"{traps}:trap", timeout_s=0.5) as box:
            first = await verdict_of(box, {"kind": "slow once", "flag": str(flag)})
            flag.touch()
            return first, await verdict_of(box, {"kind": "hang"}), box.events["overrun"]

    first, verdict, num_overruns = asyncio.run(grade())
    assert (first.status, num_overruns) == ("scored", 2)
    assert (verdict.status, verdict.cause) == ("error", "overrun")
    assert verdict.reason.endswith(", on a sample that it has graded before")
    assert "--verifier-timeout-s 0.5" in verdict.reason


def test_an_overrun_when_nothing_was_ever_graded_is_an_error(traps):
    async def grade():
        async with sandbox(f"{traps}:trap", timeout_s=0.5) as box:
            return await verdict_of(box, {"kind": "hang"})

    verdict = asyncio.run(grade())
    assert (verdict.status, verdict.cause) == ("error", "overrun")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("crash", "code 3"),
        ("signal", "code -11"),
        ("exit", "SystemExit: 4"),
        ("raise", "LookupError: no such luck"),
        ("column", "KeyError: 'missing' (the sample has kind)"),
    ],
)
def test_any_other_failure_is_an_error_with_its_reason(grader, kind, reason):
    verdict = grader.grade({"kind": kind})
    assert verdict.status == "error"
    assert reason in verdict.reason


@pytest.mark.parametrize(
    "result",
    [
        {"reward": float("nan")},
        {"reward": float("inf")},
        {"reward": "1"},
        {"reward": 1.0, "format_reward": float("nan")},
        {},
        None,
    ],
)
def test_a_reward_that_is_no_finite_number_is_an_error_naming_the_adapter(grader, traps, result):
    verdict = grader.grade({"kind": "bad reward", "result": result})
    assert verdict.status == "error"
    assert verdict.reason.startswith(f"{traps}:trap: TypeError: an adapter")


def test_an_exception_that_cannot_be_unpickled_is_only_an_error(traps):
    async def grade():
        async with sandbox(f"{traps}:strange") as box:
            return await verdict_of(box, {})

    assert "Unloadable" in asyncio.run(grade()).reason


def test_a_crash_that_does_not_repeat_costs_nothing(grader, monkeypatch):
    """The second attempt comes late enough, whatever the machine does."""
    ask, asked = GraderServer.ask, []

    async def late(server, name, samples):
        until = {"until": 0.0 if asked else 1e12}
        asked.extend(await ask(server, name, [sample | until for sample in samples]))
        return asked[-1:]

    monkeypatch.setattr(GraderServer, "ask", late)
    verdict = grader.grade({"kind": "once"})
    assert [outcome.status for outcome in asked] == ["error", "scored"]
    assert (verdict.status, verdict.reward) == ("scored", 1.0)


def test_an_adapter_reads_no_input_and_sees_no_secrets(grader):
    assert grader.grade({"kind": "stdin"}).reward == 1.0
    assert grader.grade({"kind": "environment"}).reward == 1.0


def test_hanging_and_crashing_samples_leave_the_others_alone_and_capacity_returns(traps):
    nap = f"4321.{os.getpid()}"  # recognisable among the processes of this machine

    async def grade():
        async with sandbox(f"{traps}:trap", timeout_s=0.5) as box:
            await verdict_of(box, {"kind": "fine"})
            kinds = ["hang", "fine", "crash", *["fine"] * 20, "hang", "child"]
            samples = [{"kind": kind, "nap": nap} for kind in kinds]
            verdicts = await asyncio.gather(*(verdict_of(box, sample) for sample in samples))
            started = time.perf_counter()
            again = await asyncio.gather(*(verdict_of(box, {"kind": "fine"}) for _ in range(20)))
            return kinds, verdicts, again, time.perf_counter() - started

    kinds, verdicts, again, seconds = asyncio.run(grade())
    statuses = {"fine": "scored", "crash": "error"}
    assert [v.status for v in verdicts] == [statuses.get(kind, "unscorable") for kind in kinds]
    assert [verdict.reward for verdict in again] == [1.0] * 20
    assert seconds < 20.0
    assert nap not in _command_lines()  # what an adapter started died with it


def test_servers_killed_while_idle_are_replaced_unnoticed(grader):
    for server in processes().servers:
        os.kill(server, 9)
    verdicts = grader.grade(*[{"kind": "fine"}] * 4)
    assert [verdict.reward for verdict in verdicts] == [1.0] * 4


def test_hanging_texts_do_not_delay_the_others(traps):
    """Every process hangs, and others are graded at once all the same, on spare ones."""

    async def grade():
        async with sandbox(f"{traps}:trap", timeout_s=30.0) as box:
            hanging = [asyncio.create_task(verdict_of(box, {"kind": "hang"})) for _ in range(2)]
            await asyncio.sleep(0.1)
            started = time.perf_counter()
            verdicts = await asyncio.gather(*(verdict_of(box, {"kind": "fine"}) for _ in range(20)))
            seconds = time.perf_counter() - started
            is_hanging = [not task.done() for task in hanging]
            for task in hanging:
                task.cancel()
            return verdicts, seconds, is_hanging

    verdicts, seconds, is_hanging = asyncio.run(grade())
    assert [verdict.reward for verdict in verdicts] == [1.0] * 20
    assert is_hanging == [True, True]
    assert seconds < 25.0


@pytest.mark.parametrize(
    ("kind", "points", "status", "reward"),
    [
        ("hang", 0.4, "scored", 0.4),
        ("crash", 0.4, "error", 0.0),
        ("crash", 1.0, "scored", 1.0),
    ],
)
def test_one_adapter_that_fails_does_not_spoil_the_other(traps, kind, points, status, reward):
    async def grade():
        async with sandbox(f"{traps}:trap", f"{traps}:fair", timeout_s=0.5) as box:
            await verdict_of(box, {"kind": "fine", "points": points})
            return await verdict_of(box, {"kind": kind, "points": points})

    verdict = asyncio.run(grade())
    assert (verdict.status, verdict.reward) == (status, reward)


HOSTILE = [
    "9**9**9**9",
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{100000!!}",
    "(" * 10_000 + ")" * 10_000,
    "9" * 1_000_000,
    r"\boxed{" + "9" * 1_000_000 + "}",
    r"\boxed{" * 100_000,
    "__import__('os').system('touch {flag}')",
    r"\boxed{{__import__('os').system('touch {flag}')}}",
]


@pytest.mark.parametrize("name", ["countdown", "mathd", "sympy", "math_verify"])
def test_hostile_texts_end_in_a_verdict_without_reward(name, tmp_path):
    flag = tmp_path / "flag"
    texts = [text.replace("{flag}", str(flag)) for text in HOSTILE]

    async def grade():
        async with sandbox(name) as box:
            samples = [SAMPLE | {"output": text} for text in texts]
            verdicts = await asyncio.gather(*(verdict_of(box, sample) for sample in samples))
            fair = "8-2+9" if name == "countdown" else r"\boxed{15}"
            honest = await verdict_of(box, SAMPLE | {"output": fair})
            return verdicts, honest

    verdicts, honest = asyncio.run(grade())
    assert {verdict.status for verdict in verdicts} <= {"scored", "unscorable"}
    assert [verdict.reward for verdict in verdicts] == [0.0] * len(texts)
    assert honest.reward == 1.0
    assert not flag.exists()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import time; time.sleep(60)", "whose import did not end"),
        ("import os; os._exit(9)", "whose import ended the process"),
        ("bytearray(4 << 30)", "MemoryError"),
        ("raise ValueError('bad file')", "ValueError: bad file"),
    ],
)
def test_a_registry_that_cannot_be_imported_is_told_within_seconds(tmp_path, body, told):
    (tmp_path / "mine.py").write_text(body)

    async def start():
        async with sandbox(f"{tmp_path}/mine.py:grade", start_timeout_s=2.0):
            pass

    started = time.perf_counter()
    with pytest.raises(ConfigError, match=told):
        asyncio.run(start())
    assert time.perf_counter() - started < 30.0


def _command_lines():
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_text())
        except OSError:
            continue
    return "\n".join(lines)
