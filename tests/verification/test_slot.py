"""A slot beside a keeper that is played: the order of events that real processes rarely show."""

import select
import socket

import pytest

from async_grpo.verification import frames
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.slot import Slot
from async_grpo.verification.spawner import Lines

LIVED = {"exit_code": 3, "cpu_s": 0.1, "memory_mib": 90.0}


class Players:
    """A spawner whose verifier says only that it has loaded, and whose keeper is gone by then."""

    num_restarts = 0

    def __init__(self, *last_words):
        self.last_words = last_words
        self.verifiers = []

    def spawn(self):
        work, verifier = socket.socketpair()
        ours, keeper = socket.socketpair()
        self.verifiers.append(verifier)
        verifier.sendall(framed({"load_error": ""}))
        for words in ({"confined": False}, *self.last_words):
            keeper.sendall(framed(words))
        keeper.close()
        poll = select.poll()
        poll.register(work, select.POLLIN)
        poll.register(ours, select.POLLIN)
        return Lines(1, 1, work, ours, poll)


def framed(message):
    return frames.encode(message, max_bytes=frames.MAX_ANSWER_BYTES)


@pytest.mark.parametrize(
    ("last_words", "status", "reason"),
    [((LIVED,), "error", "exit code 3"), ((), "lost", "ended from outside")],
)
def test_a_report_is_read_although_its_keeper_has_gone(last_words, status, reason):
    slot = Slot(VerifierConfig(reward_names=("mine",)), Players(*last_words))
    outcome = slot.grade("mine", {"kind": "any"})
    assert outcome.status == status
    assert reason in outcome.reason
