"""What the pool and a request's process say to each other, and what of it the pool believes.

An answer must carry its task's own random id and nothing but plain, finite, bounded values. That
is all a pool can check: a text that has taken over its process can still lie about itself, and
about the texts of its group that are graded after it.

Messages are plain JSON behind its length. Nothing is unpickled: what a text has taken over may send
any bytes, and they stay bytes.
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

Sample = dict[str, Any]  # what an adapter grades: the user's own columns, and an output
LENGTH = struct.Struct("!I")
MAX_BYTES = 256 << 20  # of a message
MAX_ANSWERS_BYTES = 1 << 20  # of one child
MAX_REASON_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one adapter did with one output, at one attempt.

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
    """The adapter has reached a limit."""
    return Outcome(adapter, "overrun", reason=reason, cause="overrun")


def adapter_sample(request: VerificationRequest) -> Sample:
    """The dict that adapters receive; what the run knows goes before columns of the same name."""
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
    """Samples of one group, by task id, for one adapter; most are plain as they come.

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
    """An outcome as the line that answers a task."""
    answer = {"id": task_id} | {name: getattr(outcome, name) for name in ANSWERS}
    return json.dumps(answer).encode("ascii") + b"\n"


def read_answers(said: str, *, task_ids: Sequence[str], adapter: str) -> list[Outcome]:
    """The outcomes of the first tasks, as many as a child has answered; a line for each, in order.

    What is no answer is an error of the task that it should have answered, and the last to count.
    """
    lines = said.removesuffix("\n").split("\n") if said else []
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
    """The outcome in an answer; raises FrameError for anything else."""
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


# What a child says of a task, and what of it is believed: never that it was lost, for example.
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
    """Bytes that are no message, or one beyond its bound."""


def encode(message: object) -> bytes:
    """The message as bytes to send; raises FrameError for what JSON or a frame cannot hold."""
    try:
        body = json.dumps(message, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"{type(error).__name__}: {error}") from error
    return LENGTH.pack(_bounded(len(body))) + body


def length_of(head: bytes) -> int:
    """The length that a frame announces; raises FrameError beyond the bound."""
    return _bounded(*LENGTH.unpack(head))


def decode(body: bytes | str) -> Any:
    """The message in a frame, or in an answer; raises FrameError for what is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{type(error).__name__}: {error}") from error


def receive(connection: socket.socket) -> Any:
    """The next message; raises EOFError when the other end is closed."""
    return decode(
        _receive_exactly(connection, length_of(_receive_exactly(connection, LENGTH.size)))
    )


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data


def _bounded(length: int) -> int:
    if length > MAX_BYTES:
        raise FrameError(f"{length} bytes, at most {MAX_BYTES} may be sent")
    return length
