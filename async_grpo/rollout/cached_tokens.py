"""How much work an update throws away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState


def cached_tokens(states: Iterable[RequestState], *, shares_prompts: bool) -> int:
    """Tokens in the KV cache of running requests, which must be recomputed when it is cleared.

    A sequence that has sampled holds its prompt and its output but for the last token, which is
    computed with the next one; a prompt that several samples share counts once. What still waits
    for its first token holds nothing worth counting.
    """
    num_tokens, seen = 0, set[int]()
    for state in states:
        num_sampled = state.detokenizer.num_output_tokens() if state.detokenizer else 0
        if not num_sampled:
            continue
        num_tokens += num_sampled - 1
        group = id(state.parent_req or state)
        if not shares_prompts or group not in seen:
            num_tokens += state.prompt_len
            seen.add(group)
    return num_tokens
