"""Token ids as the pieces of text that they stand for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


class Words:
    """Turns ids into text, one piece an id, which joined are the text."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is Hugging Face's; None: ids are shown as numbers."""
        self._decode = functools.cache(lambda ids: tokenizer.decode(ids))
        self._has_text = tokenizer is not None
        self._piece = functools.cache(self._read)

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """A piece for each id. One that is a part of a letter is shown as the unknown letter."""
        if not self._has_text:
            return [f"⟨{each}⟩" for each in ids]
        return [self._piece(before, each) for before, each in zip([None, *ids], ids, strict=False)]

    def _read(self, before: int | None, each: int) -> str:
        """What `each` adds behind `before`: some tokenizers drop a space where a text begins."""
        if before is None:
            return str(self._decode((each,)))
        pair, first = self._decode((before, each)), self._decode((before,))
        return str(pair.removeprefix(first) if pair.startswith(first) else self._decode((each,)))
