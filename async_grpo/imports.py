"""Imports of what takes seconds, a fifth of them saved."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Garbage is not looked for while torch, transformers or vLLM are imported.

    They make a million objects that stay. Measured on 2 cores: a trainer rank imports in 3.6
    instead of 4.4 s, a generation worker in 5.8 instead of 7.2 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
