"""What a verifier process that has been taken over can reach, and what becomes of it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import effort
import pytest
from verifier_processes import REPOSITORY, Grader, all_below, are_gone, processes

pytestmark = pytest.mark.integration

HOSTILE = """
import os, signal, subprocess, sys, time, json, struct
from pathlib import Path

def answer(sample):
    return {"reward": float(sample())}

def send(data):
    os.write(3, data)

def frame(message):
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body

FORGED = {"id": "0" * 32, "status": "scored", "reward": 9.0, "format_reward": None, "reason": "",
          "max_reward": 1.0, "cause": "", "place": ""}

def hostile(sample, **kwargs):
    kind = sample["kind"]
    if kind == "nap":
        time.sleep(0.3)
        return {"reward": 1.0}
    if kind == "fine":
        return {"reward": 1.0}
    if kind == "kill parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.1)
        return {"reward": 0.25}
    if kind == "kill all":
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:  # there is nobody
            pass
        time.sleep(0.1)
        return {"reward": 0.25}
    if kind == "secrets":
        seen = json.dumps(dict(os.environ))
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                seen += path.read_text(errors="replace")
            except OSError:
                pass
        seen += Path("/proc/self/environ").read_text()
        for path in sample["files"]:
            try:
                seen += Path(path).read_text()
            except OSError:
                pass
        return {"reward": float("hush" in seen)}
    if kind == "descriptors":
        here = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")}
        standard = all(here.pop(fd) == "/dev/null" for fd in (0, 1, 2))
        pipe = here.pop(3).startswith("socket:")
        others = [where for where in here.values() if not where.endswith("/fd")]
        return {"reward": float(standard and pipe and not others)}
    if kind == "rights":
        status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines())
        kept = int(status["CapEff"], 16) & ~(0b1111 | 1 << 31)
        return {"reward": float(status["NoNewPrivs"].strip() == "1" and kept == 0)}
    if kind == "escape":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", sample["nap"]])
            os._exit(0)
        time.sleep(60)
    if kind == "threads":
        import threading
        for _ in range(4):
            threading.Thread(target=lambda: [x * x for x in range(10**9)], daemon=True).start()
        time.sleep(60)
    if kind == "processor":
        import resource
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft, _ = resource.getrlimit(resource.RLIMIT_CPU)
        return {"reward": float(0 < soft - used.ru_utime - used.ru_stime <= sample["most"])}
    if kind == "processes":
        children = [subprocess.Popen(["sleep", "50"]) for _ in range(100)]
        time.sleep(60)
    if kind == "file":
        with open(sample["path"], "wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
    if kind == "flood":
        for _ in range(200):
            sys.stdout.write("x" * 1_000_000)
            os.write(2, b"y" * 1_000_000)
        return {"reward": 0.5}
    if kind == "pickle":
        bomb = b"cos\\nsystem\\n(S'touch " + sample["flag"].encode() + b"'\\ntR."
        send(b"\\x80\\x04\\x95" + bomb)
        time.sleep(60)
    if kind == "long answer":
        send(struct.pack("!I", 1 << 30) + b"x" * 100_000)
        time.sleep(60)
    if kind == "forge":
        send(frame(FORGED))
        time.sleep(60)
    if kind == "forge for the next":
        send(frame(FORGED | {"reward": 7.0}))
        return {"reward": 1.0}
    if kind == "half an answer":
        send(struct.pack("!I", 100) + b"{")
        time.sleep(60)
    if kind == "long reason":
        raise ValueError("x" * 10_000_000)
    return {"reward": 0.0}
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "hostile.py"
    path.write_text(HOSTILE)
    return f"{path}:hostile"


@pytest.fixture(scope="module")
def secret_home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("hush")
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id").write_text("hush")
    return home


@pytest.fixture(scope="module", params=["namespaces", "none"])
def grader(request, hostile, secret_home):
    """With and without what the system may not allow: namespaces."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HOME", str(secret_home))
    patch.setenv("RAY_AUTH_TOKEN", "hush")
    patch.setenv("MY_PASS", "hush")
    patch.setenv("ASYNC_GRPO_VERIFIER_NAMESPACES", "1" if request.param == "namespaces" else "0")
    grader = Grader(hostile, file_mib=16, timeout_s=1.5)
    patch.undo()
    if request.param == "namespaces" and not grader.box.is_confined:
        grader.close()
        pytest.skip("this system allows no namespaces")
    assert grader.grade({"kind": "fine"}).reward == 1.0  # what overruns are measured by
    yield grader
    grader.close()


@pytest.fixture
def patient(grader):
    """For tests that wait for deadlines: both variants of them in the full proofs only."""
    if not (grader.box.is_confined or effort.FULL):
        pytest.skip("run with PROOFS=full")
    return grader


@pytest.fixture
def confined(grader):
    if not grader.box.is_confined:
        pytest.skip("needs namespaces")
    return grader


def capacity_returns(grader, within_s=20.0):
    """Whether there are two verifiers again, and stay: spare ones end a moment after their task.

    The sandbox's event loop sees to that, so it has to go on meanwhile.
    """
    deadline, in_a_row = time.monotonic() + within_s, 0
    while in_a_row < 10 and time.monotonic() < deadline:
        grader.run(asyncio.sleep(0.02))
        now = processes()
        in_a_row = in_a_row + 1 if len(now.keepers) == len(now.verifiers) == 2 else 0
    return in_a_row == 10


def test_no_credential_is_seen_in_environment_processes_or_files(confined, secret_home):
    files = [str(secret_home / ".ray" / "auth_token"), str(secret_home / ".ssh" / "id")]
    assert confined.grade({"kind": "secrets", "files": files}).reward == 0.0


def test_no_credential_is_in_the_environment_even_without_namespaces(grader):
    for pid in processes().keepers + processes().verifiers + [processes().zygote]:
        assert b"hush" not in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize("kind", ["descriptors", "rights"])
def test_a_verifier_holds_nothing_but_its_own_pipe_and_rights_over_files(grader, kind):
    assert grader.grade({"kind": kind}).reward == 1.0


def test_processor_time_is_limited_for_each_grading_anew(grader):
    for _ in range(3):
        assert grader.grade({"kind": "processor", "most": 4.0}).reward == 1.0


@pytest.mark.parametrize("kind", ["kill parent", "kill all"])
def test_killing_everything_in_reach_harms_only_itself(confined, kind):
    before = processes()
    verdict = confined.grade({"kind": kind})
    assert (verdict.status, verdict.reward) == ("scored", 0.25)
    assert processes() == before


def test_a_keeper_that_is_killed_costs_attempts_and_no_capacity(grader):
    if grader.box.is_confined:
        pytest.skip("it is out of reach")
    before = processes()
    verdict = grader.grade({"kind": "kill parent"})
    assert (verdict.status, verdict.reward) == ("error", 0.0)
    assert [v.reward for v in grader.grade(*[{"kind": "nap"}] * 4)] == [1.0] * 4
    assert capacity_returns(grader)
    assert processes().zygote == before.zygote


def test_what_moves_to_another_session_dies_with_its_verifier(patient):
    nap = f"6543.{os.getpid()}"
    assert patient.grade({"kind": "escape", "nap": nap}).status == "unscorable"
    naps = [p for p in Path("/proc").glob("[0-9]*/cmdline") if nap.encode() in _read(p)]
    assert naps == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("threads", "processor time"),
        ("processes", "more than 64 processes"),
        ("file", "writes more than 16 MiB"),
    ],
)
def test_a_limit_that_is_reached_twice_is_the_texts_doing(patient, kind, reason, tmp_path):
    verdict = patient.grade({"kind": kind, "path": str(tmp_path / "big")})
    assert (verdict.status, verdict.reward) == ("unscorable", 0.0)
    assert reason in verdict.reason or (kind == "threads" and "longer than" in verdict.reason)


def test_a_flood_of_output_goes_nowhere_and_delays_nothing(patient, capfd):
    assert patient.grade({"kind": "flood"}).reward == 0.5
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("pickle", "no answer: "),
        ("long answer", "at most 65536 may come"),
        ("forge", "an answer to another task"),
    ],
)
def test_a_forged_answer_is_an_error_and_nothing_is_run(grader, kind, reason, tmp_path):
    flag = tmp_path / "flag"
    verdict = grader.grade({"kind": kind, "flag": str(flag)})
    assert (verdict.status, verdict.reward) == ("error", 0.0)
    assert reason in verdict.reason
    assert not flag.exists()


def test_an_answer_left_for_the_next_sample_is_never_taken_for_its_own(grader):
    for _ in range(3):
        first = grader.grade({"kind": "forge for the next"})
        assert first.status == "error"
        assert grader.grade({"kind": "fine"}).reward == 1.0


def test_half_an_answer_holds_nobody_up(patient):
    verdicts = patient.grade({"kind": "half an answer"}, *[{"kind": "fine"}] * 20)
    assert [verdict.reward for verdict in verdicts] == [0.0] + [1.0] * 20


def test_a_long_reason_is_cut(grader):
    verdict = grader.grade({"kind": "long reason"})
    assert verdict.status == "error"
    assert 200 < len(verdict.reason) < 700


@pytest.mark.parametrize("role", ["verifiers", "keepers", "zygote", "watchman"])
def test_any_process_of_ours_that_is_killed_from_outside_costs_nothing(grader, role):
    assert capacity_returns(grader)
    retried = grader.box.events["retried"]
    victims = getattr(processes(), role)
    victims = victims if isinstance(victims, list) else [victims]
    below = processes().verifiers
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    assert are_gone(below)
    verdicts = grader.grade(*[{"kind": "nap"}] * 4)
    assert [verdict.reward for verdict in verdicts] == [1.0] * 4
    assert grader.box.events["retried"] == retried
    assert capacity_returns(grader)


@pytest.mark.parametrize("role", ["verifiers", "keepers", "zygote"])
def test_a_process_that_is_stopped_from_outside_is_replaced_and_nothing_lost(patient, role):
    assert capacity_returns(patient)
    victims = getattr(processes(), role)
    before = patient.box.events["retried"]
    for victim in victims if isinstance(victims, list) else [victims]:
        os.kill(victim, signal.SIGSTOP)
    verdicts = patient.grade(*[{"kind": "nap"}] * 4)
    if role == "zygote":
        os.kill(victims, signal.SIGCONT)
    assert [verdict.reward for verdict in verdicts] == [1.0] * 4
    assert (patient.box.events["retried"] > before) == (role == "verifiers")


POOL = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from verifier_processes import sandbox

async def main():
    async with sandbox(sys.argv[2], timeout_s=60.0) as box:
        print("ready", flush=True)
        await asyncio.gather(*(box.grade({"kind": "escape", "nap": "3210"}) for _ in range(2)))

asyncio.run(main())
"""


@pytest.mark.parametrize("namespaces", ["1", "0"])
def test_nothing_outlives_a_pool_that_is_killed(hostile, namespaces):
    here = str(Path(__file__).parent)
    environment = os.environ | {
        "ASYNC_GRPO_VERIFIER_NAMESPACES": namespaces,
        "PYTHONPATH": REPOSITORY,
    }
    command = [sys.executable, "-c", POOL, here, hostile]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as pool:
        try:
            assert pool.stdout.readline() == b"ready\n"
            deadline = time.monotonic() + 30
            while len(all_below(pool.pid)) < 10 and time.monotonic() < deadline:
                time.sleep(0.05)
            below = all_below(pool.pid)
        finally:
            pool.kill()
    assert len(below) == 10  # watchman, zygote, two keepers, verifiers, their children, and naps
    assert are_gone(below)


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_the_pool_reads_frames_and_never_a_pickle():
    assert socket.socketpair  # the pipes are sockets: no multiprocessing connection unpickles
    for name in ("slot", "frames", "tasks", "spawner", "zygote", "keeper"):
        source = Path(REPOSITORY, "async_grpo", "verification", f"{name}.py").read_text()
        assert "import pickle" not in source
        assert "multiprocessing" not in source
