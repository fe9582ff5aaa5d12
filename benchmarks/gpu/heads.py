"""Log-probabilities of a 152k vocabulary, forward and backward: ours in chunks, and others' ways.

Every way gets the same hidden states and head (bf16; float32 without a device) and makes the
gradient of both. `full logits` is
the plain form, float32 logits in one piece. Liger's fused losses are whole losses: cross-entropy
(no weights, no entropy) and GRPO (outputs padded to rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from async_grpo.model.lm_head import Head
from async_grpo.model.logprobs import token_logprobs
from benchmarks.gpu import clock
from benchmarks.gpu.isolation import NotHereError
from benchmarks.results import Figure, median

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [N, H], head [V, H], ids [N]
GROUP = 8  # outputs of a question, as Liger's GRPO loss wants rows


def chunked(chunk_size: int, *, compiled: bool = False) -> Loss:
    """Ours, as the trainer runs it."""

    def loss(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
        scored = token_logprobs(
            hidden, Head(head), ids, temperature=1.0, chunk_size=chunk_size, compile=compiled
        )
        return scored.logprobs.sum()

    return loss


def full_logits(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    logits = (hidden @ head.T).float()
    return logits.log_softmax(-1).gather(-1, ids[:, None]).sum()


def liger_cross_entropy(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise NotHereError(f"liger-kernel cannot be imported: {error}") from error
    if hidden.device.type != "cuda":
        raise NotHereError("its Triton kernels need a device")
    return -LigerFusedLinearCrossEntropyLoss(reduction="sum")(head, hidden, ids)


def liger_grpo(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError as error:
        raise NotHereError(f"liger-kernel cannot be imported: {error}") from error
    rows = ids.view(GROUP, -1)
    with torch.no_grad():
        old = torch.full(rows.shape, -11.0, device=ids.device)
    advantages = torch.linspace(-1, 1, GROUP, device=ids.device)
    fused = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=True)
    mask = torch.ones_like(rows)
    loss, _ = fused(
        hidden.view(GROUP, -1, hidden.shape[-1]),
        head,
        rows,
        mask,
        advantages,
        old_per_token_logps=old,
    )
    return loss


WAYS: dict[str, Loss] = {
    "full logits": full_logits,
    "chunks of 128": chunked(128),
    "chunks of 512": chunked(512),
    "chunks of 1024": chunked(1024),
    "chunks of 4096": chunked(4096),
    "chunks of 1024, compiled": chunked(1024, compiled=True),
    "Liger cross-entropy": liger_cross_entropy,
    "Liger GRPO": liger_grpo,
}


def measure(
    way: str, *, num_tokens: int, hidden_size: int, vocabulary: int, repeats: int = 7
) -> Iterator[Figure]:
    """Time and peak memory of one way."""
    device = clock.find_device()
    inputs = make_inputs(num_tokens, hidden_size=hidden_size, vocabulary=vocabulary)
    work = partial(run, WAYS[way], inputs)
    times = clock.repeated(work, device=device, warmups=2, repeats=repeats)
    yield median(f"head, {way}, time", times, "s")
    yield Figure(f"head, {way}, extra memory", extra_bytes(way, inputs) / clock.GIB, "GiB")


def make_inputs(num_tokens: int, *, hidden_size: int, vocabulary: int) -> list[Tensor]:
    """Hidden states [N, H], head [V, H] and ids [N]."""
    device = clock.find_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, device=device, dtype=dtype)
    head = torch.randn(vocabulary, hidden_size, device=device, dtype=dtype) * 0.02
    ids = torch.randint(vocabulary, (num_tokens,), device=device)
    return [hidden.requires_grad_(), head.requires_grad_(), ids]


def run(loss: Loss, inputs: list[Tensor]) -> None:
    """Forward and backward."""
    loss(*inputs).backward()
    inputs[0].grad = inputs[1].grad = None


def extra_bytes(way: str, inputs: list[Tensor]) -> int:
    """The most that one pass takes beyond its inputs and their gradients."""
    peak = clock.peak_bytes(partial(run, WAYS[way], inputs), device=inputs[0].device)
    return peak - inputs[0].nbytes - inputs[1].nbytes
