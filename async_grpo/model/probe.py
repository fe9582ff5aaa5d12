"""A check at load time that packing is exact for this architecture.

Options of a config can be listed, architectures cannot: a model whose layers carry state across
sequences, or whose head does more than multiply, is found by asking it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_grpo.errors import ModelError
from async_grpo.model.policy import PolicyModel
from async_grpo.types import PackedMinibatch

LENGTHS = (5, 3)  # two sequences; the second one sees a leak from the first
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_TOLERANCE = 0.2  # nats


@torch.no_grad()
def check_packing(policy: PolicyModel, path: str) -> None:
    """Raise ModelError unless a packed row scores as the model's own separate forwards do."""
    sequences = _sequences(policy.model.config.vocab_size)
    packed = policy(_pack(sequences), temperature=1.0, chunk_size=3).logprobs
    alone = torch.cat([_score_alone(policy, sequence) for sequence in sequences])
    difference = (packed - alone).abs().max().item()
    if not difference <= TOLERANCE.get(policy.model.dtype, HALF_TOLERANCE):
        raise ModelError(
            f"a packed row must score as separate sequences do, {path} "
            f"({type(policy.model).__name__}) is off by {difference:.2g} nats: this architecture "
            "cannot be trained here, use another model"
        )


def _sequences(vocab_size: int) -> list[Tensor]:
    """Fixed ids that differ from each other where the vocabulary allows."""
    ids = torch.arange(1, sum(LENGTHS) + 1) * 7919 % vocab_size
    return list(ids.split(LENGTHS))


def _pack(sequences: list[Tensor]) -> PackedMinibatch:
    """Every token but the first of each sequence is scored."""
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    rows = [torch.arange(length) for length in LENGTHS]
    positions = [row[:-1] + start for row, start in zip(rows, starts[:-1], strict=True)]
    num_scored = sum(LENGTHS) - len(LENGTHS)
    unused = torch.zeros(num_scored)
    return PackedMinibatch(
        input_ids=torch.cat(sequences),
        position_ids=torch.cat(rows),
        cu_seqlens=starts.int(),
        max_seqlen=max(LENGTHS),
        logit_positions=torch.cat(positions),
        target_ids=torch.cat([sequence[1:] for sequence in sequences]),
        sample_index=torch.zeros(num_scored, dtype=torch.int64),
        weights=unused,
        advantages=unused,
        behaviour_logprobs=unused,
        reference_logprobs=None,
        num_samples=len(LENGTHS),
    )


def _score_alone(policy: PolicyModel, sequence: Tensor) -> Tensor:
    """What the model's own forward, head included, says of one sequence."""
    logits = policy.model(input_ids=sequence[None], use_cache=False).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(-1, sequence[1:, None]).squeeze(-1)
