"""What a request that has been taken over can reach, and what becomes of it."""

import asyncio
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import effort
import pytest
from no_namespaces import refusing_bwrap
from verifier_processes import (
    REPOSITORY,
    Grader,
    all_below,
    are_gone,
    processes,
    verdict_of,
)

from async_grpo.verification import confinement

pytestmark = pytest.mark.integration
TOOL = runpy.run_path(f"{REPOSITORY}/tools/seccomp_filters.py")

HOSTILE = """
import os, signal, subprocess, sys, time, json, struct
from pathlib import Path

def answer(sample):
    return {"reward": float(sample())}

def send(data):
    os.write(3, data)

def frame(message):
    return json.dumps(message).encode()

FORGED = {"id": "0" * 32, "status": "scored", "reward": 9.0, "format_reward": None, "reason": "",
          "max_reward": 1.0, "cause": "", "place": ""}

def reaches(sample):
    try:
        exec(sample["code"], {})
    except OSError:
        return False
    return True

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
        pipe = here.pop(3).startswith("pipe:")
        others = [where for where in here.values() if not where.endswith("/fd")]
        return {"reward": float(standard and pipe and not others)}
    if kind == "rights":
        status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines())
        kept = int(status["CapEff"], 16) | int(status["CapPrm"], 16)
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
    if kind == "bomb":
        count = 0
        while True:
            if os.fork() == 0:
                time.sleep(60)
    if kind == "processes":
        children = [subprocess.Popen(["sleep", "50"]) for _ in range(100)]
        time.sleep(60)
    if kind == "file":
        import tempfile
        with tempfile.TemporaryFile() as file:
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
        os._exit(0)
    if kind == "long answer":
        send(b"x" * 100_000)
    if kind == "forge":
        send(frame(FORGED))
        os._exit(0)
    if kind == "half an answer":
        send(b"{")
        time.sleep(60)
    if kind == "reach":
        return {"reward": float(reaches(sample))}
    if kind == "others":
        seen = [p for p in os.listdir("/proc") if p.isdigit()]
        return {"reward": float(seen == [str(os.getpid())])}
    if kind == "memory of the server":
        tried = [f"/proc/{pid}/mem" for pid in sample["pids"]] + ["/proc/1/mem"]
        mine = os.stat("/proc/self/mem").st_ino
        opened = [p for p in tried if os.path.exists(p) and os.stat(p).st_ino != mine]
        return {"reward": float(bool(opened))}
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
def grader(request, hostile, secret_home, tmp_path_factory):
    """With and without what the system may not allow: namespaces."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HOME", str(secret_home))
    patch.setenv("RAY_AUTH_TOKEN", "hush")
    patch.setenv("MY_PASS", "hush")
    if request.param == "none":
        folder = refusing_bwrap(tmp_path_factory.mktemp("bin"))
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    confinement.find_bwrap.cache_clear()
    grader = Grader(hostile, file_mib=16, timeout_s=1.5, unconfined_rewards=True)
    patch.undo()
    confinement.find_bwrap.cache_clear()
    if request.param == "namespaces" and not grader.is_confined:
        grader.close()
        pytest.skip("this system allows no namespaces")
    assert grader.grade({"kind": "fine"}).reward == 1.0  # what overruns are measured by
    yield grader
    grader.close()


@pytest.fixture
def patient(grader):
    """For tests that wait for deadlines: both variants of them in the full proofs only."""
    if not (grader.is_confined or effort.FULL):
        pytest.skip("run with PROOFS=full")
    return grader


@pytest.fixture
def confined(grader):
    if not grader.is_confined:
        pytest.skip("needs namespaces")
    return grader


def test_no_credential_is_seen_in_environment_processes_or_files(confined, secret_home):
    files = [str(secret_home / ".ray" / "auth_token"), str(secret_home / ".ssh" / "id")]
    assert confined.grade({"kind": "secrets", "files": files}).reward == 0.0


def test_no_credential_is_in_the_environment_even_without_namespaces(grader):
    """Of a request, whose memory still holds what its server was started with."""
    given = "str(os.environ) + open('/proc/self/environ').read()"
    code = f"import os\nif 'hush' in {given} or 'HOME' not in {given}: open('')"
    assert grader.grade({"kind": "reach", "code": code}).reward == 1.0


@pytest.mark.parametrize("kind", ["descriptors", "rights"])
def test_a_request_holds_nothing_but_its_own_pipe_and_no_right(grader, kind):
    assert grader.grade({"kind": kind}).reward == 1.0


def test_processor_time_is_limited_for_each_request_anew(grader):
    for _ in range(3):
        assert grader.grade({"kind": "processor", "most": 5.0}).reward == 1.0


@pytest.mark.parametrize("kind", ["kill parent", "kill all"])
def test_killing_everything_in_reach_harms_only_itself(confined, kind):
    before = processes().servers
    verdict = confined.grade({"kind": kind})
    assert (verdict.status, verdict.reward) in (("scored", 0.25), ("error", 0.0))
    assert [v.reward for v in confined.grade(*[{"kind": "nap"}] * 4)] == [1.0] * 4
    assert processes().servers == before


def test_a_request_sees_no_process_but_itself_nor_the_memory_of_the_server(confined):
    assert confined.grade({"kind": "others"}).reward == 1.0
    sample = {"kind": "memory of the server", "pids": processes().servers}
    assert confined.grade(sample).reward == 0.0


def test_a_server_that_is_killed_by_its_request_costs_attempts_and_no_capacity(grader):
    if grader.is_confined:
        pytest.skip("it is out of reach")
    verdict = grader.grade({"kind": "kill parent"})
    assert (verdict.status, verdict.reward) == ("error", 0.0)
    assert [v.reward for v in grader.grade(*[{"kind": "nap"}] * 4)] == [1.0] * 4


def test_what_moves_to_another_session_dies_with_its_request(patient):
    nap = f"6543.{os.getpid()}"
    assert patient.grade({"kind": "escape", "nap": nap}).status == "unscorable"
    assert [p for p in Path("/proc").glob("[0-9]*/cmdline") if nap.encode() in _read(p)] == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("threads", "--verifier-timeout-s"),
        ("processes", "more than 64 processes"),
        ("bomb", "more than 64 processes"),
        ("file", "writes more than 16 MiB"),
    ],
)
def test_a_limit_that_is_reached_twice_is_the_texts_doing(patient, kind, reason):
    verdict = patient.grade({"kind": kind})
    assert (verdict.status, verdict.reward) == ("unscorable", 0.0)
    assert reason in verdict.reason


def test_a_flood_of_output_goes_nowhere_and_delays_nothing(patient, capfd):
    assert patient.grade({"kind": "flood"}).reward == 0.5
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("kind", "statuses", "reason"),
    [
        ("pickle", ("error",), "no answer: "),
        ("long answer", ("error",), "no answer: "),
        ("forge", ("error",), "an answer to another task"),
    ],
)
def test_a_forged_answer_earns_nothing_and_nothing_is_run(
    patient, kind, statuses, reason, tmp_path
):
    flag = tmp_path / "flag"
    verdict = patient.grade({"kind": kind, "flag": str(flag)})
    assert (verdict.status in statuses, verdict.reward) == (True, 0.0)
    assert reason in verdict.reason
    assert not flag.exists()


def test_half_an_answer_holds_nobody_up(patient):
    verdicts = patient.grade({"kind": "half an answer"}, *[{"kind": "fine"}] * 20)
    assert [verdict.reward for verdict in verdicts] == [0.0] + [1.0] * 20


def test_a_long_reason_is_cut(grader):
    verdict = grader.grade({"kind": "long reason"})
    assert verdict.status == "error"
    assert 200 < len(verdict.reason) < 700


@pytest.mark.parametrize("role", ["servers", "outer", "requests"])
def test_any_process_of_ours_that_is_killed_from_outside_costs_nothing(grader, role):
    async def grade():
        naps = asyncio.gather(*(verdict_of(grader.box, {"kind": "nap"}) for _ in range(4)))
        await asyncio.sleep(0.15)
        for victim in getattr(processes(), role):
            os.kill(victim, signal.SIGKILL)
        return await naps

    assert [verdict.reward for verdict in grader.run(grade())] == [1.0] * 4


def test_a_server_that_is_stopped_from_outside_is_replaced_and_nothing_lost(confined, monkeypatch):
    monkeypatch.setattr("async_grpo.util.deadlines.GRADER_SILENCE_S", 1.0)
    before = confined.box.events["server_restarts"]
    for victim in processes().servers:
        os.kill(victim, signal.SIGSTOP)
    assert [v.reward for v in confined.grade(*[{"kind": "nap"}] * 4)] == [1.0] * 4
    assert confined.box.events["server_restarts"] == before + 1


def connect_to(listener):
    return f"import socket; socket.create_connection({listener.getsockname()!r}, 5)"


def test_users_functions_read_files_and_write_none_but_in_their_own_scratch(confined, tmp_path):
    def reaches(code):
        return confined.grade({"kind": "reach", "code": code}).reward == 1.0

    (tmp_path / "data").write_text("mine")
    assert reaches(f"open({str(tmp_path / 'data')!r}).read()")
    assert not reaches(f"open({str(tmp_path / 'other')!r}, 'w')")
    assert not reaches("open('/proc/sys/kernel/core_pattern', 'w').write('x')")
    assert not reaches("import os; os.mkdir('/run/mine')")
    assert reaches("import tempfile; tempfile.NamedTemporaryFile(delete=False).write(b'x')")
    assert not reaches(
        "import os; os.listdir('/dev/shm')[0] if os.listdir('/dev/shm') else open('')"
    )


def test_the_kernel_refuses_a_request_what_no_reward_needs(grader):
    """Each would fail in another way too, but not with these errors."""
    machine = TOOL["MACHINES"]
    which = list(machine).index(os.uname().machine)
    table = TOOL["GRADER"] | TOOL["UNKNOWN_TO_GRADERS"]
    code = f"""
import ctypes, errno
library = ctypes.CDLL(None, use_errno=True)
for number in {sorted(numbers[which] for numbers in table.values())!r}:
    done = library.syscall(number, 0, 0, 0, 0, 0, 0)
    if done != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        raise OSError(number)
"""
    assert grader.grade({"kind": "reach", "code": code}).reward == 1.0


@pytest.mark.parametrize("network", [True, False])
def test_users_functions_have_the_network_unless_it_is_taken_away(hostile, network):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        grader = Grader(hostile, network=network)
        if not grader.is_confined:
            grader.close()
            pytest.skip("needs namespaces")
        verdict = grader.grade({"kind": "reach", "code": connect_to(listener)})
        grader.close()
    assert verdict.reward == float(network)


def test_users_functions_get_the_variables_that_are_named_and_no_other(hostile, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "mine")
    monkeypatch.setenv("OTHER_KEY", "hush")
    code = """import os
if 'OTHER_KEY' in os.environ or os.environ.get('JUDGE_KEY') != 'mine':
    open('')
"""
    grader = Grader(hostile, environment=("JUDGE_KEY",))
    verdict = grader.grade({"kind": "reach", "code": code})
    grader.close()
    assert verdict.reward == 1.0


POOL = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from verifier_processes import sandbox

async def main():
    async with sandbox(sys.argv[2], timeout_s=60.0, unconfined_rewards=True) as box:
        print("ready", flush=True)
        await box.grade([{"kind": "escape", "nap": "3210"}])

asyncio.run(main())
"""


@pytest.mark.parametrize("has_namespaces", [True, False])
def test_nothing_outlives_a_pool_that_is_killed(hostile, has_namespaces, tmp_path):
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": REPOSITORY}
    if not has_namespaces:
        environment["PATH"] = f"{refusing_bwrap(tmp_path)}:{environment['PATH']}"
    command = [sys.executable, "-c", POOL, here, hostile]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as pool:
        try:
            assert pool.stdout.readline() == b"ready\n"
            deadline = time.monotonic() + 30
            while not (naps := _naps(pool.pid)) and time.monotonic() < deadline:
                time.sleep(0.05)
            below = all_below(pool.pid)
        finally:
            pool.kill()
    assert naps
    assert are_gone(below)


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _naps(pool):
    return [pid for pid in all_below(pool) if b"3210" in _read(Path(f"/proc/{pid}/cmdline"))]
