"""What an adapter's result or exception means, without a process around it."""

import socket
import urllib.error

import numpy as np
import pytest
import torch

from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.graders.shipped import warm_up
from async_grpo.verification.verifier import run_adapter

CONFIG = VerifierConfig(reward_names=("mine",))


def call(adapter, **sample):
    (outcome,) = run_adapter("mine", adapter, [sample], CONFIG, left_out={})
    return outcome


def raising(error, *, cause=None):
    def adapter(sample):
        raise error from cause

    return call(adapter)


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        (0.25, 0.25),
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        ({"reward": True, "format_reward": np.bool_(False)}, 1.0),
    ],
)
def test_a_number_or_a_boolean_is_a_reward(result, reward):
    outcome = call(lambda sample: result)
    assert (outcome.status, outcome.reward, type(outcome.reward)) == ("scored", reward, float)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "an adapter's reward must be a finite number, got None"),
        ("good", "an adapter's reward must be a finite number, got 'good'"),
        ({"reward": "good"}, "an adapter's reward must be a finite number, got 'good'"),
        (float("nan"), "an adapter's reward must be a finite number, got nan"),
        (1j, "an adapter's reward must be a finite number, got 1j"),
        (np.ones(2), "an adapter's reward must be a finite number, got array([1., 1.])"),
        ({"score": 1.0}, "an adapter's dict must have a 'reward', got {'score': 1.0}"),
    ],
)
def test_anything_else_is_an_error_that_shows_it_and_where_the_reward_begins(result, told):
    def adapter(sample):
        return result

    outcome = call(adapter)
    assert (outcome.status, outcome.cause) == ("error", "exception")
    assert outcome.reason.startswith(f"TypeError: {told}")
    assert outcome.reason.endswith(f" [test_calls.py:{adapter.__code__.co_firstlineno}]")


class ClientError(Exception):
    __module__ = "httpx._exceptions"


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (raising(ConnectionRefusedError(111, "refused")), "connection"),
        (raising(TimeoutError("timed out")), "connection"),
        (raising(socket.gaierror(-2, "no such name")), "connection"),
        (raising(OSError(101, "Network is unreachable")), "connection"),
        (raising(urllib.error.URLError("refused")), "connection"),
        (raising(ClientError("503")), "connection"),
        (raising(RuntimeError("judge"), cause=ClientError("503")), "connection"),
        (raising(FileNotFoundError(2, "no such file")), "exception"),
        (raising(OSError(28, "No space left on device")), "exception"),
        (raising(ValueError("no")), "exception"),
        (raising(SystemExit(3)), "exception"),
    ],
)
def test_failures_of_a_connection_are_told_from_those_of_the_adapter(outcome, cause):
    assert (outcome.status, outcome.cause) == ("error", cause)


def test_a_failure_names_the_line_of_the_users_file_and_not_that_of_a_library():
    outcome = call(lambda sample: np.stack([]))
    line = outcome.place.removeprefix("ValueError test_calls.py:")
    assert line.isdigit()
    assert outcome.reason == f"ValueError: need at least one array to stack [test_calls.py:{line}]"


def test_a_long_message_leaves_room_for_the_line():
    outcome = call(lambda sample: sample["x"], **{f"column_{n}": n for n in range(100)})
    assert outcome.reason.startswith("KeyError: 'x' (the sample has column_0, column_1")
    assert len(outcome.reason) == 500
    assert outcome.reason.endswith("]")


def test_users_warm_up_takes_a_grader_of_output_and_answer():
    graded = []
    warm_up(lambda output, answer: graded.append((output, answer)))
    assert all(type(each) is str for pair in graded for each in pair) and len(graded) > 1
