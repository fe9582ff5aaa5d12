"""Ranks that end in every way: what is said last, which code stands for all, and who is left."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_process_leash import wait_until_ended

from async_grpo.cli.train import main
from async_grpo.launch.local_ranks import TRAINER_NODE, choose_interfaces
from async_grpo.util import deadlines
from async_grpo.util.ports import interfaces

REPOSITORY = Path(__file__).parents[2]
COMMAND = """
import json, os, signal, sys, time
from async_grpo.util import deadlines
from async_grpo.launch import local_ranks
from async_grpo.launch.local_ranks import end_with_agent, rank0_only_errors
from async_grpo.util.errors import ConfigError, RankLostError

deadlines.RANKS_LEAVING_S = 0.5
if "RANK" not in os.environ:
    sys.exit(local_ranks.run_ranks(2))

rank = int(os.environ["RANK"])
signal.signal(signal.SIGINT, signal.SIG_DFL)
def ready():  # in one piece: two ranks speak at once
    os.write(1, f"{os.getpid()}{os.linesep}".encode())
def ends_like_a_command():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
"""
WAITS = "ends_like_a_command(); ready(); time.sleep(600)"


def start(rank_0, rank_1="pass", **variables):
    """The command whose ranks do this."""
    indented = [code.replace("\n", "\n    ") for code in (rank_0, rank_1)]
    code = f"{COMMAND}\nif rank == 0:\n    {indented[0]}\nelse:\n    {indented[1]}\n"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(child):
    """Exit code, lines of output, lines of errors."""
    out, err = child.communicate(timeout=60)
    return child.returncode, out.splitlines(), err.splitlines()


TELL = (
    "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR',\n"
    "         'MASTER_PORT', 'OMP_NUM_THREADS')\n"
    "told = json.dumps({name: os.environ[name] for name in names})\n"
    "os.write(1, (told + os.linesep).encode())"
)


def gloo_towards(master, **given):
    environ = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": master, **given}
    choose_interfaces(environ)
    assert "NCCL_SOCKET_IFNAME" not in environ
    return environ.get("GLOO_SOCKET_IFNAME", "")


def test_ranks_of_several_machines_meet_on_the_way_to_rank_0_and_never_by_loopback():
    ways = [
        (name, address)
        for name, addresses in interfaces().items()
        for address in addresses
        if re.fullmatch(r"\d+\.\d+\.\d+\.\d+", address) and not address.startswith("127.")
    ]
    for name, address in ways:
        assert gloo_towards(address) == name
    for master in ("127.0.1.1", "localhost", "nowhere.invalid"):  # rank 0's own machine, or unknown
        assert gloo_towards(master) in {name for name, _ in ways} | {""}
    assert gloo_towards("127.0.1.1", GLOO_SOCKET_IFNAME="ib0") == "ib0"


def test_ranks_that_end_well_are_told_where_they_meet():
    code, out, err = ended(start(TELL, TELL))
    assert (code, err) == (0, [])
    first, second = sorted(map(json.loads, out), key=lambda told: told["RANK"])
    assert (first["RANK"], first["LOCAL_RANK"]) == ("0", "0")
    assert second == first | {"RANK": "1", "LOCAL_RANK": "1"}
    assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"]) == ("2", "2")
    assert first["MASTER_ADDR"] == "127.0.0.1"
    assert first["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")


def test_ranks_of_another_machine_are_the_next_ones_and_meet_at_the_first():
    code, out, err = ended(start(TELL, TELL, **{TRAINER_NODE: "1 3 10.0.0.4 23456"}))
    assert (code, err) == (0, [])
    told = sorted(map(json.loads, out), key=lambda told: told["RANK"])
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in told] == [("2", "0"), ("3", "1")]
    for each in told:
        assert (each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) == ("6", "2")
        assert (each["MASTER_ADDR"], each["MASTER_PORT"]) == ("10.0.0.4", "23456")


def test_the_first_rank_of_another_machine_is_named_in_its_log():
    fails = (
        "if rank == 3:\n    time.sleep(600)\n"
        "with rank0_only_errors():\n    raise ConfigError('this node lacks the model')"
    )
    code, _, err = ended(start("pass", fails, **{TRAINER_NODE: "1 2 127.0.0.1 23456"}))
    assert code == 1 and err[-1] == "error: trainer rank 2: this node lacks the model"


def test_what_rank_0_has_said_stays_the_last_word():
    says = "with rank0_only_errors():\n    print('error: no such thing', file=sys.stderr); "
    code, _, err = ended(start(says + "raise ConfigError('no such thing')", WAITS))
    assert code == 1
    assert err[0] == "error: no such thing"
    assert all("trainer rank" not in line for line in err)


def test_the_cause_of_another_rank_is_said_last_and_rank_0_is_ended():
    fails = "with rank0_only_errors():\n    raise ConfigError('this node lacks the model')"
    code, _, err = ended(start(WAITS, fails))
    assert code == 1
    assert err[-1] == "error: trainer rank 1: this node lacks the model"


def test_the_cause_is_said_after_what_rank_0_says_of_its_consequence():
    """Rank 0 has lost its peer, and ends before anybody has looked."""
    killed = "ready(); os.kill(os.getpid(), signal.SIGKILL)"
    follows = (
        "time.sleep(0.5); print('error: another trainer rank has died', file=sys.stderr)\n"
        "with rank0_only_errors():\n    raise RankLostError('another trainer rank has died')"
    )
    code, _, err = ended(start(follows, killed))
    assert code == 1
    assert err[-1].startswith("error: trainer rank 1 has ended by SIGKILL and without a word: look")


def test_a_rank_0_that_ends_without_a_word_is_told_of():
    code, _, err = ended(start("os._exit(7)", WAITS))
    assert code == 1
    assert err[-1].startswith("error: trainer rank 0 has ended with exit code 7 and without a word")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_and_ends_in_its_code(number, code):
    child = start(WAITS, WAITS)
    pids = [int(child.stdout.readline()) for _ in range(2)]
    child.send_signal(number)
    assert ended(child) == (code, [], [])
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_end_when_their_launcher_is_killed():
    waits = "end_with_agent(); " + WAITS
    child = start(waits, waits)
    pids = [int(child.stdout.readline()) for _ in range(2)]
    child.kill()
    child.communicate(timeout=60)  # the pipes end with the ranks, which have inherited them
    for pid in pids:
        wait_until_ended(pid)


def test_a_number_that_is_not_torchruns_own_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(deadlines, "OTHERS_ENDED_S", 0.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    required = ("--model-name-or-path", "model", "--data-path", "data.jsonl")
    result = CliRunner().invoke(main, [*required, "--nproc-per-node", "4"])
    assert result.exit_code == 1
    assert "--nproc-per-node must be left to torchrun, which has started 2, got 4" in result.stderr
