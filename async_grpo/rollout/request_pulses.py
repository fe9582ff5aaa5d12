"""How far each request is, out of what the engine's scheduler says of single sequences. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from async_grpo.types import RequestPulse


def request_pulses(
    sequences: Iterable[tuple[int, Collection[str]]],
    *,
    num_tokens: Mapping[str, int],
    running: Collection[str],
) -> dict[int, RequestPulse]:
    """By lease.

    Args:
        sequences: of each request, by lease, those that have not ended.
        num_tokens: of each sequence that the engine has.
        running: which of these run; the others wait for a place or for memory.

    >>> sequences = [(3, ["a", "b"]), (4, ["c"]), (5, ["lost"])]
    >>> for pulse in request_pulses(
    ...     sequences, num_tokens={"a": 7, "b": 0, "c": 9}, running=["a"]
    ... ).items():
    ...     print(*pulse)
    3 RequestPulse(num_tokens=7, is_waiting=False)
    4 RequestPulse(num_tokens=9, is_waiting=True)
    5 RequestPulse(num_tokens=0, is_waiting=False)
    """
    pulses = {}
    for lease_id, names in sequences:
        known = [name for name in names if name in num_tokens]
        pulses[lease_id] = RequestPulse(
            num_tokens=sum(num_tokens[name] for name in known),
            is_waiting=bool(known) and not any(name in running for name in known),
        )
    return pulses
