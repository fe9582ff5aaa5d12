import socket
import time

import pytest

from async_grpo.verification.frames import FrameError, encode, receive, send


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def soon():
    return time.monotonic() + 5.0


@pytest.mark.parametrize(
    "message", [{"text": "\x00\ud800\u202e" * 1000, "n": 2**80, "x": 0.1}, [], None, "\\" * 70_000]
)
def test_what_is_sent_is_received(ends, message):
    ours, theirs = ends
    send(ours, encode(message, max_bytes=1 << 20), deadline=soon())
    assert receive(theirs, max_bytes=1 << 20, deadline=soon()) == message


def test_two_messages_stay_two(ends):
    ours, theirs = ends
    send(ours, encode(1, max_bytes=99) + encode(2, max_bytes=99), deadline=soon())
    assert [receive(theirs, max_bytes=99, deadline=soon()) for _ in range(2)] == [1, 2]


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x95.",  # a pickle's first bytes: an absurd length
        b"\x00\x01\x00\x00" + b"1",
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
        receive(theirs, max_bytes=60_000, deadline=soon())


def test_nothing_is_read_beyond_the_bound(ends):
    ours, theirs = ends
    ours.sendall(encode("x" * 100, max_bytes=200))
    with pytest.raises(FrameError, match="102 bytes announced, at most 50"):
        receive(theirs, max_bytes=50, deadline=soon())


def test_a_message_that_stops_halfway_ends_at_the_deadline(ends):
    ours, theirs = ends
    ours.sendall(encode("x" * 100, max_bytes=200)[:50])
    with pytest.raises(TimeoutError):
        receive(theirs, max_bytes=200, deadline=time.monotonic() + 0.1)
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs, max_bytes=200, deadline=soon())


def test_a_sender_whose_reader_sleeps_ends_at_the_deadline(ends):
    with pytest.raises(TimeoutError):
        send(ends[0], b"x" * (8 << 20), deadline=time.monotonic() + 0.1)


def test_values_that_json_cannot_hold_are_refused():
    for value in (object(), {1, 2}, 10**5000):
        with pytest.raises(FrameError):
            encode(value, max_bytes=1 << 20)
    with pytest.raises(FrameError, match="at most 10"):
        encode("x" * 20, max_bytes=10)
