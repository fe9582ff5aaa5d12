"""What a text could reach that has taken over a shipped grader: as this user, and as nobody."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from verifier_processes import REPOSITORY, sandbox

from async_grpo.verification.config import NOBODY

pytestmark = pytest.mark.integration

GRADER = """
def reach(sample):
    try:
        exec(sample["code"], {})
    except OSError:
        return 0.0
    return 1.0
"""
# It asks a server of shipped graders to run the code of somebody who has taken one over.
SCRIPT = """
import asyncio, json, sys
from collections import Counter
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.graders.shipped import SHIPPED
from async_grpo.verification.server import GraderServer

async def main():
    config = VerifierConfig(reward_names=(sys.argv[1],), timeout_s=5.0)
    server = GraderServer(config, shipped=True, events=Counter())
    await server.start()
    rewards = {}
    for name, code in json.load(sys.stdin).items():
        (outcome,) = await server.ask(sys.argv[1], [{"code": code}])
        rewards[name] = [outcome.status, outcome.reward]
    server.close()
    print(json.dumps({"confined": server.isolation.confined, "rewards": rewards}))

asyncio.run(main())
"""


@pytest.fixture(params=["this user", "nobody"])
def run_as(request):
    """A way to run the script as a user, in a home of its own."""
    uid = os.getuid() if request.param == "this user" else NOBODY
    python = sys.executable
    if uid != os.getuid():
        if os.getuid() != 0:
            pytest.skip("only root can become nobody")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        python = shutil.which(version, path="/usr/bin:/usr/local/bin") or ""
        if not python:
            pytest.skip(f"nobody can read no {version} here")
    with tempfile.TemporaryDirectory() as folder:
        for name in (".ssh", ".ray"):
            Path(folder, name).mkdir(mode=0o755)
            Path(folder, name, "secret").write_text("hush")
        Path(folder, "grader.py").write_text(GRADER)
        for path in [folder, *map(str, Path(folder).rglob("*"))]:
            os.chown(path, uid, -1)
        environment = {"HOME": folder, "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        paths = [REPOSITORY, *(path for path in sys.path if "site-packages" in path)]

        def run(codes):
            done = subprocess.run(
                [python, "-c", SCRIPT, f"{folder}/grader.py:reach"],
                input=json.dumps(codes(Path(folder))).encode(),
                capture_output=True,
                env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
                user=uid,
                extra_groups=[] if os.getuid() == 0 else None,
                cwd="/",
                timeout=120,
            )
            assert done.returncode == 0, done.stderr.decode()
            answer = json.loads(done.stdout)
            if not answer["confined"]:
                pytest.skip("this system allows no namespaces")
            return answer["rewards"]

        yield run


def test_a_shipped_grader_reaches_no_network_no_process_no_secret_and_writes_no_file(run_as):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as named:
        named.bind(f"\0async-grpo-{os.getpid()}")
        named.listen()
        connect = f"import socket; socket.create_connection({listener.getsockname()!r}, 5)"
        abstract = f"\\0async-grpo-{os.getpid()}"
        rewards = run_as(
            lambda home: {
                "allowed": "open('/etc/passwd').read(); open('/dev/null', 'w').write('x')",
                "loopback of the host": connect,
                "outside": "import socket; socket.create_connection(('192.0.2.1', 80), 5)",
                "abstract socket": "import socket\n"
                f"socket.socket(socket.AF_UNIX).connect('{abstract}')",
                "credentials": f"open('{home}/.ssh/secret')",
                "token": f"open('{home}/.ray/secret')",
                "home": f"open('{home}/new', 'w')",
                "temporary files": "open('/tmp/new-of-async-grpo', 'w')",
                "shared memory": "open('/dev/shm/new', 'w')",
                "run": "open('/run/new', 'w')",
                "sysctl": "open('/proc/sys/kernel/hostname', 'w').write('x')",
                "other process": "import os; os.kill(2, 0)",
                "second mount": "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
                "if libc.mount(b'x', b'/tmp', b'tmpfs', 0, None): open('')",
            }
        )
    assert rewards.pop("allowed") == ["scored", 1.0]
    assert [name for name, outcome in rewards.items() if outcome != ["scored", 0.0]] == []


def test_the_registrys_rewards_are_shipped_and_a_file_is_a_users(tmp_path):
    import asyncio

    path = tmp_path / "mine.py"
    path.write_text("def mine(sample):\n    return 1.0\n")

    async def networks():
        async with sandbox("countdown", f"{path}:mine") as box:
            return [server.isolation.network for server in box._servers.values()]

    assert asyncio.run(networks()) == [False, True]
