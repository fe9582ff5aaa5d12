"""Messages between the pool and a request's process, and the pool's checks of the answers.

An answer must carry the random id of its task, and only plain, finite, bounded values. The pool can
check no more: a text that has taken over its process can still lie about itself, and about the
texts of its group that are graded after it.

A message is its length, then JSON. Nothing is unpickled: a process that was taken over may send any
bytes, and none of them is run.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from async_grpo.util.errors import escaped

if TYPE_CHECKING:
    from async_grpo.types import FailureCause, VerificationRequest

Sample = dict[str, Any]  # an adapter's input: the user's own columns, and an output
LENGTH = struct.Struct("!I")
MAX_BYTES = 256 << 20  # of a message
MAX_ANSWERS_BYTES = 1 << 20  # of one child
MAX_REASON_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one attempt of one adapter on one output.

    `overrun`: it used more time, memory, stack, files or processes than a verification may.
    `error`: the adapter failed. `lost`: its process was ended from outside.
    """

    adapter: str
    status: Literal["scored", "unscorable", "overrun", "error", "lost"]
    reward: float = 0.0
    format_reward: float | None = None
    reason: str = ""
    max_reward: float = 1.0
    cause: FailureCause = ""
    place: str = ""  # of an exception: its type and the user's line
    is_checked: bool = False  # a control sample had been graded in time just before

    @property
    def is_graded(self) -> bool:
        return self.status in ("scored", "unscorable")


def overrun(adapter: str, reason: str) -> Outcome:
    """The outcome of an attempt that reached a limit."""
    return Outcome(adapter, "overrun", reason=reason, cause="overrun")


def adapter_sample(request: VerificationRequest) -> Sample:
    """The dict that adapters receive; the run's values replace columns of the same name."""
    question, completion = request.question, request.completion
    return dict(question.columns) | {
        "input": question.input,
        "answer": question.answer,
        "output": completion.text,
        "sample_text": question.input + completion.text,
        "output_token_ids": completion.token_ids.tolist(),
        "finish_reason": completion.finish_reason,
    }


def portable(sample: Mapping[str, object]) -> tuple[Sample, dict[str, str]]:
    """The sample as plain values, and the type by name of each column that has no plain value.

    Arrays become lists, dates and decimals text.

    >>> portable({"nums": (1, 2), "picture": object()})
    ({'nums': [1, 2]}, {'picture': 'object'})
    """
    plain: Sample = {}
    left_out: dict[str, str] = {}
    for name, value in sample.items():
        try:
            plain[str(name)] = json.loads(json.dumps(value, default=_substitute))
        except (TypeError, ValueError, RecursionError):
            left_out[str(name)] = type(value).__name__
    return plain, left_out


def encode_request(adapter: str, samples: Mapping[str, Mapping[str, object]]) -> bytes:
    """The message that asks one adapter to grade samples of one group, given by task id.

    Samples are made plain only if they cannot be sent as they are, which is rare.

    >>> encode_request("mine", {"7": {"nums": (1, 2)}})[4:]
    b'{"id":"7","adapter":"mine","tasks":[["7",{"nums":[1,2]},{}]]}'
    """
    message: dict[str, object] = {"id": next(iter(samples)), "adapter": adapter}
    try:
        plain: list[object] = [(task_id, sample, {}) for task_id, sample in samples.items()]
        return encode(message | {"tasks": plain})
    except FrameError:
        made = [(task_id, *portable(sample)) for task_id, sample in samples.items()]
        return encode(message | {"tasks": made})


def encode_answer(task_id: str, outcome: Outcome) -> bytes:
    """The line that answers a task with its outcome."""
    answer = {"id": task_id} | {name: getattr(outcome, name) for name in ANSWERS}
    return json.dumps(answer).encode("ascii") + b"\n"


def read_answers(answers: str, *, task_ids: Sequence[str], adapter: str) -> list[Outcome]:
    """The outcomes of the tasks that a child has answered: the first ones, a line each, in order.

    A line that is no answer becomes an error of its task, and no line after it is read.
    """
    lines = answers.removesuffix("\n").split("\n") if answers else []
    outcomes: list[Outcome] = []
    try:
        for task_id, line in zip(task_ids, lines, strict=False):
            outcomes.append(read_answer(decode(line), task_id=task_id, adapter=adapter))
        if len(lines) > len(task_ids):
            outcomes.pop()
            raise FrameError("more than its answer")
    except FrameError as error:
        reason = f"its process sent what is no answer: {error}"
        outcomes.append(Outcome(adapter, "error", reason=reason, cause="end"))
    return outcomes


def read_answer(message: object, *, task_id: str, adapter: str) -> Outcome:
    """The outcome in an answer; raises FrameError for another message."""
    if not isinstance(message, dict) or set(message) != {"id", *ANSWERS}:
        raise FrameError("not the entries of an answer")
    if message["id"] != task_id:
        raise FrameError("an answer to another task")
    for name, is_right in ANSWERS.items():
        if not is_right(message[name]):
            raise FrameError(f"a {name} that is none")
    texts = {name: escaped(message[name]) for name in ("reason", "place")}
    return Outcome(adapter, **{name: message[name] for name in ANSWERS} | texts)


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_short_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_REASON_CHARACTERS


# The entries of a child's answer, and the check of each: a child may not report a task as lost.
ANSWERS: Mapping[str, Callable[[object], bool]] = {
    "status": lambda value: value in ("scored", "unscorable", "overrun", "error"),
    "reward": _is_finite,
    "format_reward": lambda value: value is None or _is_finite(value),
    "reason": _is_short_text,
    "max_reward": _is_finite,
    "cause": lambda value: value in ("", "exception", "connection", "overrun"),
    "place": _is_short_text,
}


def _substitute(value: Any) -> object:
    if isinstance(value, date | time | Decimal):
        return str(value)
    if hasattr(value, "tolist"):  # numpy's and torch's arrays and numbers
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no plain value")


class FrameError(Exception):
    """Bytes that are no message, or a message that is too long."""


def encode(message: object) -> bytes:
    """The message as bytes to send; raises FrameError if it is no JSON or too long."""
    try:
        body = json.dumps(message, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"{type(error).__name__}: {error}") from error
    return LENGTH.pack(_bounded(len(body))) + body


def length_of(head: bytes) -> int:
    """The length of the message behind its head; raises FrameError if it is too long."""
    return _bounded(*LENGTH.unpack(head))


def decode(body: bytes | str) -> Any:
    """The message in JSON; raises FrameError if it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{type(error).__name__}: {error}") from error


def receive(connection: socket.socket) -> Any:
    """The next message; raises EOFError when the other end is closed."""
    length = length_of(_receive_exactly(connection, LENGTH.size))
    return decode(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data


def _bounded(length: int) -> int:
    if length > MAX_BYTES:
        raise FrameError(f"{length} bytes, at most {MAX_BYTES} may be sent")
    return length
