"""What runs, the most important first: what the time does not reach is the least missed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.gpu import attention, clock, heads, numerics, trainer
from benchmarks.gpu.isolation import Trial
from benchmarks.gpu.shapes import QWEN_05B, QWEN_7B, QWEN_15B, TOY
from benchmarks.gpu.trainer import Variant

BUDGET = 16_384
GOAL_VARIANTS = (  # of these the fastest is held against the goal of the issue
    Variant(QWEN_15B, BUDGET),
    Variant(QWEN_15B, BUDGET, compiled=True),
    Variant(QWEN_15B, BUDGET, checkpointing=True, collects=True),
    Variant(QWEN_15B, BUDGET, checkpointing=True, compiled=True),
)
OTHER_VARIANTS = (
    Variant(QWEN_15B, BUDGET, checkpointing=True, fused=True),
    Variant(QWEN_15B, BUDGET, checkpointing=True, fused=True, compiled=True),
    Variant(QWEN_7B, BUDGET, checkpointing=True),
    Variant(QWEN_05B, BUDGET),
    Variant(QWEN_15B, BUDGET, bf16_weights=True),
    Variant(QWEN_15B, 4_096),
    Variant(QWEN_15B, 32_768, checkpointing=True),
    Variant(QWEN_7B, BUDGET, checkpointing=True, compiled=True),
    Variant(QWEN_05B, BUDGET, compiled=True),
    Variant(QWEN_15B, BUDGET, compiled=True, bf16_weights=True),
    Variant(QWEN_7B, BUDGET),
)
TOY_VARIANTS = (
    Variant(TOY, 512, collects=True),
    Variant(TOY, 512, checkpointing=True),
    Variant(TOY, 512, fused=True),
    Variant(TOY, 512, bf16_weights=True, checkpointing=True),
)


def trials(parts: Sequence[str], *, toy: bool, compiles: bool) -> list[Trial]:
    """The chosen parts' variants, in order, after what the device can do at most.

    Without `compiles` all but those that torch.compile makes.
    """
    stages = [
        ("numerics", [_numerics(toy=toy, compiles=compiles)]),
        ("trainer", _trainer(TOY_VARIANTS if toy else GOAL_VARIANTS, toy=toy)),
        ("heads", [_head(way, toy=toy) for way in heads.WAYS]),
        ("attention", [_attention(way, toy=toy) for way in attention.WAYS]),
        ("trainer", [] if toy else _trainer(OTHER_VARIANTS, toy=toy)),
    ]
    chosen = [trial for part, found in stages if part in parts for trial in found]
    limits = Trial("limits of the device", partial(clock.limits, toy=toy))
    return [limits, *(t for t in chosen if compiles or not t.name.endswith("compiled"))]


def _numerics(*, toy: bool, compiles: bool) -> Trial:
    shape = TOY if toy else numerics.SHAPE
    return Trial("numerics", partial(numerics.measure, shape, compiles=compiles))


def _trainer(variants: Sequence[Variant], *, toy: bool) -> list[Trial]:
    repeats = 3 if toy else 6
    return [Trial(v.name, partial(trainer.measure, v, repeats=repeats)) for v in variants]


def _head(way: str, *, toy: bool) -> Trial:
    num_tokens, hidden, words = (512, 64, 32_000) if toy else (BUDGET, QWEN_15B.hidden, 151_936)
    work = partial(heads.measure, way, num_tokens=num_tokens, hidden_size=hidden, vocabulary=words)
    return Trial(f"head, {way}", work)


def _attention(way: str, *, toy: bool) -> Trial:
    shape, num_tokens = (TOY, 2048) if toy else (QWEN_15B, BUDGET)
    work = partial(attention.measure, way, shape=shape, num_tokens=num_tokens)
    return Trial(f"attention, {way}", work)
