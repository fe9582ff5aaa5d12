"""A check at load time that packing is exact for this architecture.

Options of a config can be listed, architectures cannot: a model whose layers carry state across
sequences, or whose head does more than multiply, is found by asking it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from async_grpo.errors import ModelError
from async_grpo.model.collate import collate_pairs
from async_grpo.model.policy import PolicyModel

LENGTHS = (4, 3, 2)  # a prompt, and outputs of two of its samples
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_TOLERANCE = 0.2  # nats
Pair = tuple[NDArray[np.int32], NDArray[np.int32]]


@torch.no_grad()
def check_packing(policy: PolicyModel, path: str) -> None:
    """Raise ModelError unless a packed row scores as the model's own separate forwards do."""
    pairs = _pairs(policy.model.config.vocab_size)
    row = collate_pairs(pairs, share_prompts=policy.shares_prompts)
    packed = policy(row, temperature=1.0, chunk_size=3).logprobs
    alone = torch.cat([_score_alone(policy, *pair) for pair in pairs])
    difference = (packed - alone).abs().max().item()
    if not difference <= TOLERANCE.get(policy.model.dtype, HALF_TOLERANCE):
        raise ModelError(
            f"a packed row must score as separate sequences do, {path} "
            f"({type(policy.model).__name__}) is off by {difference:.2g} nats: this architecture "
            "cannot be trained here, use another model"
        )


def _pairs(vocab_size: int) -> list[Pair]:
    """Fixed ids that differ from each other where the vocabulary allows.

    The third sequence sees a leak from those before it, the second one a prompt that is not its.
    """
    ids = (np.arange(1, sum(LENGTHS) + 1) * 7919 % vocab_size).astype(np.int32)
    prompt, first, second = np.split(ids, np.cumsum(LENGTHS[:-1]))
    return [(prompt, first), (prompt, second), (second, prompt)]


def _score_alone(
    policy: PolicyModel, prompt: NDArray[np.int32], output: NDArray[np.int32]
) -> Tensor:
    """What the model's own forward, head included, says of one output."""
    ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None]).squeeze(-1)
