"""What the pool and a request's process say to each other, and what of it the pool believes.

An answer must carry its task's own random id and nothing but plain, finite, bounded values. That
is all a pool can check: a text that has taken over its process can still lie about itself, and
about the texts of its group that are graded after it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any

from async_grpo.verification.frames import MAX_TASK_BYTES, FrameError, decode, encode
from async_grpo.verification.verdict import Outcome

MAX_REASON_CHARACTERS = 500
ANSWER_KEYS = {"id", "status", "reward", "format_reward", "reason", "max_reward", "cause", "place"}
ANSWER_STATUS = ("scored", "unscorable", "overrun", "error")
ANSWER_CAUSES = ("", "exception", "connection", "overrun")


def portable(sample: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The sample as plain values, and the type by name of each column that has no plain value.

    Arrays become lists, dates and decimals text.

    >>> portable({"nums": (1, 2), "picture": object()})
    ({'nums': (1, 2)}, {'picture': 'object'})
    """
    plain: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in sample.items():
        try:
            plain[str(name)] = _plain(value)
        except (TypeError, ValueError, RecursionError):
            left_out[str(name)] = type(value).__name__
    return plain, left_out


def encode_request(adapter: str, samples: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Samples of one group, by task id, for one adapter; most are plain as they come.

    >>> encode_request("mine", {"7": {"nums": (1, 2)}})[4:]
    b'{"id":"7","adapter":"mine","tasks":[["7",{"nums":[1,2]},{}]]}'
    """
    message: dict[str, Any] = {"id": next(iter(samples)), "adapter": adapter}
    try:
        plain: list[Any] = [(task_id, sample, {}) for task_id, sample in samples.items()]
        return encode(message | {"tasks": plain}, max_bytes=MAX_TASK_BYTES)
    except FrameError:
        made = [(task_id, *portable(sample)) for task_id, sample in samples.items()]
        return encode(message | {"tasks": made}, max_bytes=MAX_TASK_BYTES)


def encode_answer(task_id: str, outcome: Outcome) -> bytes:
    """An outcome as the line that answers a task."""
    answer = {
        "id": task_id,
        "status": outcome.status,
        "reward": outcome.reward,
        "format_reward": outcome.format_reward,
        "reason": outcome.reason[:MAX_REASON_CHARACTERS],
        "max_reward": outcome.max_reward,
        "cause": outcome.cause,
        "place": outcome.place[:MAX_REASON_CHARACTERS],
    }
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


def read_answer(message: Any, *, task_id: str, adapter: str) -> Outcome:
    """The outcome in an answer; raises FrameError for anything else."""
    if not isinstance(message, dict) or set(message) != ANSWER_KEYS:
        raise FrameError("not the entries of an answer")
    if message["id"] != task_id:
        raise FrameError("an answer to another task")
    if message["status"] not in ANSWER_STATUS or message["cause"] not in ANSWER_CAUSES:
        raise FrameError("an unknown status or cause")
    given = message["format_reward"]
    return Outcome(
        adapter,
        message["status"],
        reward=_finite(message["reward"]),
        format_reward=None if given is None else _finite(given),
        reason=_short_text(message["reason"]),
        max_reward=_finite(message["max_reward"]),
        cause=message["cause"],
        place=_short_text(message["place"]),
    )


def _short_text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_REASON_CHARACTERS:
        raise FrameError("a reason that is no short text")
    return value


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FrameError("a reward that is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FrameError("a reward that is not finite")
    return number


def _plain(value: Any) -> Any:
    """The value as JSON can hold it; most columns are plain as they come."""
    try:
        json.dumps(value)
    except TypeError:
        value = json.loads(json.dumps(value, default=_substitute))
    return value


def _substitute(value: Any) -> Any:
    if isinstance(value, date | time | Decimal):
        return str(value)
    if hasattr(value, "tolist"):  # numpy's and torch's arrays and numbers
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no plain value")
