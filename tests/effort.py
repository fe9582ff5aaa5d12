"""How hard the proofs try: a small profile in `make test`, all of it in `make test-all`."""

import os

FULL = os.environ.get("PROOFS") == "full"


def histories(small: int, *, full: int = 10_000) -> int:
    """Random histories that a property is tried on; fewer in full where each trains a model."""
    return full if FULL else small


def updates(small: int) -> int:
    """Weight updates of a run that compares engine and trainer."""
    return 50 if FULL else small


def max_ranks(small: int) -> int:
    """Gloo ranks of the largest world."""
    return 4 if FULL else small
