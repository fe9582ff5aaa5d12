"""Seconds and bytes a token of what a teacher sends, at the vocabulary of SmolLM2 (49,152 tokens).

The teacher has the width of SmolLM2-135M and one layer, so that what is timed is mostly its head;
weights and what is sent of them are bfloat16, as on a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from async_grpo.model.scorer import Scorer, TokenIds
from async_grpo.rollout.teacher_payloads import teach
from async_grpo.types import Payload
from benchmarks.alternation import alternate
from benchmarks.results import Figure, median

VOCAB_SIZE, HIDDEN_SIZE = 49_152, 576
PAYLOADS = {
    "topk of 64": Payload("topk", 64, 1.0),
    "hidden": Payload("hidden", 0, 1.0),
    "logits": Payload("logits", 0, 1.0),
}
NOTHING = "log-probabilities alone"
GOALS = {"topk of 64": 1 / 100, "hidden": 1 / 20}  # of the bytes of full bf16 logits
LOGPROB_BYTES = 4  # of the sampled token: it travels with every payload


def figures(folder: Path, *, tokenizer: Path, num_rows: int, repeats: int) -> list[Figure]:
    """Of `num_rows` outputs of 64 tokens after prompts of 64."""
    scorer = Scorer(
        str(make_teacher(folder, tokenizer=tokenizer)),
        device=torch.device("cpu"),
        dtype="bfloat16",
    )
    rng = np.random.default_rng(0)
    pairs = [(_ids(rng, 64), _ids(rng, 64)) for _ in range(num_rows)]
    num_tokens = 64 * num_rows
    sizes: dict[str, float] = {}

    def timed(name: str, payload: Payload | None) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            if payload is None:
                scorer.score(pairs, temperature=1.0)
            else:
                taught = teach(scorer, pairs, temperature=1.0, payload=payload, width=VOCAB_SIZE)
                held = sum(array.nbytes for _, arrays in taught for array in arrays.values())
                sizes[name] = held / num_tokens + LOGPROB_BYTES
            return (time.perf_counter() - began) / num_tokens * 1e6

        return run

    variants = {name: timed(name, payload) for name, payload in PAYLOADS.items()}
    seconds = alternate({NOTHING: timed(NOTHING, None), **variants}, repeats=repeats)
    return [*_costs(seconds), *_sizes(sizes)]


def make_teacher(folder: Path, *, tokenizer: Path) -> Path:
    """A random model; its tokenizer is of no matter here."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def _ids(rng: np.random.Generator, length: int) -> TokenIds:
    return rng.integers(VOCAB_SIZE, size=length).astype(np.int32)


def _costs(seconds: dict[str, list[float]]) -> list[Figure]:
    return [
        median(f"teacher's time a token, {name}", values, "us") for name, values in seconds.items()
    ]


def _sizes(sizes: dict[str, float]) -> list[Figure]:
    logits = 2.0 * VOCAB_SIZE
    found: Sequence[Figure] = [Figure(f"a token, {n}", size, "bytes") for n, size in sizes.items()]
    shares = [
        Figure(f"bytes a token, {name} / full bf16 logits", sizes[name] / logits, "x", goal=goal)
        for name, goal in GOALS.items()
    ]
    return [*found, *shares]
