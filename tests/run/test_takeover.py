"""Who may take a batcher's name from whom."""

import os
import subprocess
import sys

import pytest

from async_grpo.cluster import Owner
from async_grpo.errors import ConfigError
from async_grpo.run import takeover


@pytest.fixture
def dead_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.fixture
def name(monkeypatch):
    """A name that its owner holds until its batcher is ended, or forever."""

    class Name:
        owner, is_ended, num_tries = None, False, 0

        def make(self):
            self.num_tries += 1
            if not self.is_ended:
                raise ValueError("taken")
            return "batcher"

        def end(self):
            self.is_ended = True

    held = Name()
    monkeypatch.setattr(takeover.cluster, "owner_of", lambda _: held.owner)
    monkeypatch.setattr(takeover, "_end_batcher", held.end)
    monkeypatch.setattr(takeover, "TAKEOVER_TIMEOUT_S", 0.3)
    return held


def test_the_batcher_of_a_trainer_that_was_killed_here_is_ended_at_once(name, dead_pid):
    name.owner = Owner("10.0.0.1", dead_pid, is_here=True)
    assert takeover.take_name(name.make) == "batcher"
    assert name.num_tries == 2


def test_an_earlier_batcher_of_this_process_is_ended(name):
    name.owner = Owner("10.0.0.1", os.getpid(), is_here=True)
    assert takeover.take_name(name.make) == "batcher"


def test_a_zombie_trainer_is_dead(name):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, nobody has looked
    name.owner = Owner("10.0.0.1", child.pid, is_here=True)
    assert takeover.take_name(name.make) == "batcher"
    child.wait()


@pytest.mark.parametrize("is_here", [True, False])
def test_a_trainer_that_may_live_keeps_its_workers(name, is_here, dead_pid):
    pid = os.getppid() if is_here else dead_pid
    name.owner = Owner("10.0.0.1", pid, is_here=is_here)
    with pytest.raises(ConfigError, match=rf"another trainer \(process {pid} on 10.0.0.1\) uses"):
        takeover.take_name(name.make)
    assert name.num_tries > 1
