"""What a registry remembers of its workers' comings and goings. Pure; bounded."""

from __future__ import annotations

from collections import Counter

NUM_EXCLUSIONS_KEPT = 256


class History:
    """Counts events for ever, and knows the newest exclusions."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by `kind` or `kind: cause`
        self.exclusions: dict[str, str] = {}  # the latest workers that were fenced, with the reason

    def note(
        self, kind: str, worker_id: str = "", cause: str = "", reason: str = "", *, num: int = 1
    ) -> None:
        """Something has happened to a worker, or to `num` of its leases.

        `cause` is a word or two, such as "died", `reason` a sentence.

        >>> history = History()
        >>> history.note("registered", "w0")
        >>> history.note("fenced", "w0", "died", "its process has ended")
        >>> history.note("revoked", "w0", "died", num=3)
        >>> dict(history.counts)
        {'registered': 1, 'fenced: died': 1, 'revoked: died': 3}
        """
        if not num:
            return
        self.counts[f"{kind}: {cause}" if cause else kind] += num
        if kind == "fenced":
            self.exclusions[worker_id] = reason
            if len(self.exclusions) > NUM_EXCLUSIONS_KEPT:
                del self.exclusions[next(iter(self.exclusions))]
