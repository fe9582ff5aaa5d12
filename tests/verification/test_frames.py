import socket

import pytest

from async_grpo.verification import tasks
from async_grpo.verification.tasks import FrameError, encode, receive


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    "message", [{"text": "\x00\ud800\u202e" * 1000, "n": 2**80, "x": 0.1}, [], None, "\\" * 70_000]
)
def test_what_is_sent_is_received(ends, message):
    ours, theirs = ends
    ours.sendall(encode(message))
    assert receive(theirs) == message


def test_two_messages_stay_two(ends):
    ours, theirs = ends
    ours.sendall(encode(1) + encode(2))
    assert [receive(theirs) for _ in range(2)] == [1, 2]


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x95.",  # a pickle's first bytes: an absurd length
        b"\x10\x00\x00\x01" + b"1",
        b"\x00\x00\x00\x02{]",
        b"\x00\x00\x00\x01\xff",
        b"\x00\x00\x00\x00",
        b"\x00\x00\x03\xe8" + b"[" * 1000,
        b"\x00\x00\x20\x00" + b"9" * 8192,
    ],
)
def test_bytes_that_are_no_message_are_refused(ends, data):
    ours, theirs = ends
    ours.sendall(data)
    with pytest.raises(FrameError):
        receive(theirs)


def test_nothing_is_read_beyond_the_bound(ends):
    ours, theirs = ends
    too_many = tasks.MAX_BYTES + 1
    ours.sendall(tasks.LENGTH.pack(too_many) + b"x")
    with pytest.raises(FrameError, match=f"{too_many} bytes, at most {tasks.MAX_BYTES}"):
        receive(theirs)
    assert theirs.recv(2) == b"x"


def test_a_message_that_stops_halfway_is_the_end(ends):
    ours, theirs = ends
    ours.sendall(encode("x" * 100)[:50])
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)


def test_values_that_no_frame_can_hold_are_refused(monkeypatch):
    for value in (object(), {1, 2}, 10**5000):
        with pytest.raises(FrameError):
            encode(value)
    monkeypatch.setattr(tasks, "MAX_BYTES", 10)
    with pytest.raises(FrameError, match="at most 10"):
        encode("x" * 20)
