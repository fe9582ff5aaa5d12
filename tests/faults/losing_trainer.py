"""`trainer_core.py` whose ranks lose what a teacher said of every third minibatch; same options."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from async_grpo.cli.train import main
from async_grpo.cluster.cluster import Cluster
from async_grpo.util import deadlines

LOST_EVERY = 3  # fetches of payloads, the first among them
real_fetch = Cluster.fetch
numbers = itertools.count()


def fetch(
    cluster: Cluster, references: Sequence[Any], *, timeout_s: float, owner: str
) -> list[Any | None]:
    """The real one, but for the first object of such a minibatch."""
    found = real_fetch(cluster, references, timeout_s=timeout_s, owner=owner)
    is_payload = timeout_s == deadlines.PAYLOADS_FETCHED_S
    return [None, *found[1:]] if is_payload and next(numbers) % LOST_EVERY == 0 else found


if __name__ == "__main__":
    Cluster.fetch = fetch  # type: ignore[method-assign]
    main()
