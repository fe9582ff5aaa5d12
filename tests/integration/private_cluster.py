"""A Ray cluster of one test session: its own port, its own folder, ended by its own process ids."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from async_grpo.util.ports import free_port

START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 3  # gcs_server and raylet are known to ignore SIGTERM
# A token that lies on the machine, or another test's ray.init, must not decide how we connect.
HERMETIC = {"RAY_AUTH_MODE": "disabled"}
# Ray would start a process a CPU, of 0.8 s each, before anybody asks; ours bring an environment.
ON_DEMAND = {"RAY_prestart_worker_first_driver": "0"}
PRIVATE = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def environment(**extra: str) -> dict[str, str]:
    """This process's variables for a command under test, without those that lead to a cluster."""
    kept = {name: value for name, value in os.environ.items() if name not in PRIVATE}
    if path := extra.get("PYTHONPATH"):
        extra["PYTHONPATH"] = os.pathsep.join([path, kept.get("PYTHONPATH", "")])
    return kept | HERMETIC | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | extra


class PrivateCluster:
    """`ray start --head` in a session of processes of its own."""

    def __init__(self, *, num_cpus: int = 8, env: dict[str, str] | None = None) -> None:
        # Short: the sockets below it may have names of 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="ag-")
        self.address = f"127.0.0.1:{free_port()}"
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
            f"--port={self.address.rpartition(':')[2]}", f"--temp-dir={self._folder}",
            f"--num-cpus={num_cpus}", f"--object-store-memory={256 << 20}",
            "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats",
            "--include-log-monitor=false",  # nobody listens, and it takes 3 % of a core
            f"--ray-client-server-port={free_port()}",  # not the one of every other cluster here
        ]  # fmt: skip
        self._log = Path(self._folder) / "start.log"
        with self._log.open("w") as log:
            self._head = subprocess.Popen(
                command, env=(env or environment()) | ON_DEMAND, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._wait_until_up()

    def stop(self) -> None:
        """End every process of the cluster, and remove its folder; once is enough."""
        family = sessions_of({self._head.pid})
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            _wait_until_ended(family)
            family |= sessions_of({self._head.pid})
        self._head.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_until_up(self) -> None:
        def is_up() -> bool:
            return "Ray runtime started" in self._log.read_text() or self._head.poll() is not None

        if not _wait_until(is_up, timeout_s=START_TIMEOUT_S) or self._head.poll() is not None:
            text = self._log.read_text()
            self.stop()
            raise RuntimeError(f"no private Ray cluster: {text}")


def sessions_of(leaders: set[int]) -> set[int]:
    """Every process in the session of one of `leaders`, and the descendants of all of these.

    Verifiers open sessions of their own, and orphans have lost their parent: one alone misses some.
    """
    table = dict(_processes())
    family = {pid for pid, (_, session) in table.items() if session in leaders} | leaders
    while True:
        children = {pid for pid, (parent, _) in table.items() if parent in family}
        if children <= family:
            return family & table.keys()
        family |= children


def is_running(pid: int) -> bool:
    """False for a zombie too: it only waits for its parent to look."""
    try:
        return _stat(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _processes():  # (pid, (parent, session))
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                _, parent, _, session = _stat(int(entry))[:4]
                yield int(entry), (int(parent), int(session))


def _stat(pid: int) -> list[str]:
    """State, parent, group, session, ... of /proc/PID/stat; the name before may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _wait_until_ended(pids: set[int]) -> None:
    _wait_until(lambda: not any(map(is_running, pids)), timeout_s=STOP_TIMEOUT_S)


def _wait_until(condition, *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
