"""What an update changes of published weights, and what of it travels with --weight-delta.

A model of this repository that has been trained (sample-data/tiny-countdown) takes policy-gradient
steps on its own samples, by the trainer's optimizer; before and after each step the weights are
packed as they are published. No engine and no cluster: bytes are counted, nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from async_grpo.types import WeightsVersion
from async_grpo.weight_sync.buckets import pack
from async_grpo.weight_sync.delta import encode
from async_grpo.weight_sync.publisher import LEAST_GAIN
from benchmarks import results
from benchmarks.results import Figure, median

NAME = "weight_delta"
MODEL = "sample-data/tiny-countdown"
PROMPTS = ["use 2 9 8 to make 15\n", "use 1 4 7 to make 12\n", "use 3 5 6 to make 8\n"]
NUM_SAMPLES, NUM_TOKENS, WARMUP_STEPS = 8, 32, 3


class Trainer:
    """The model, and what it makes of its own samples."""

    def __init__(self, learning_rate: float) -> None:
        torch.manual_seed(0)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self._prompts = [tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS]
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.0
        )

    def step(self) -> None:
        """Raise the likelihood of half of the samples, lower that of the others."""
        for prompt in self._prompts:
            rows = prompt.repeat(NUM_SAMPLES, 1)
            with torch.no_grad():
                ids = self.model.generate(
                    rows, do_sample=True, max_new_tokens=NUM_TOKENS, pad_token_id=0
                )
            logprobs = self.model(ids).logits[:, :-1].log_softmax(-1)
            taken = logprobs.gather(-1, ids[:, 1:, None])[:, prompt.shape[1] - 1 :, 0].sum(-1)
            advantages = torch.tensor([1.0, -1.0]).repeat(NUM_SAMPLES // 2)
            (-(advantages * taken).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def published(self, dtype: torch.dtype) -> Sequence[NDArray[np.uint8]]:
        named = ((n, p.detach().to(dtype)) for n, p in self.model.named_parameters())
        return [b.data for b in pack(named, put=np.copy, version=WeightsVersion(0, 0)).buckets]


def sent(new: NDArray[np.uint8], old: NDArray[np.uint8], *, item_bytes: int) -> int:
    """Bytes of a bucket that travel: what changed, or all of it."""
    delta = encode(new, old, item_bytes=item_bytes)
    pays = delta is not None and delta.nbytes * LEAST_GAIN <= new.nbytes
    return delta.nbytes if delta is not None and pays else new.nbytes


def measure(learning_rate: float, dtype: torch.dtype, *, num_steps: int) -> list[Figure]:
    """Of every update after the first few, in which AdamW finds its pace."""
    trainer, shares, changed = Trainer(learning_rate), [], []
    for step in range(WARMUP_STEPS + num_steps):
        before = trainer.published(dtype)
        trainer.step()
        after = trainer.published(dtype)
        if step < WARMUP_STEPS:
            continue
        pairs, size = list(zip(after, before, strict=True)), dtype.itemsize
        whole = sum(new.nbytes for new in after)
        shares.append(sum(sent(new, old, item_bytes=size) for new, old in pairs) / whole)
        moved = sum(int((n.view(f"u{size}") != o.view(f"u{size}")).sum()) for n, o in pairs)
        changed.append(moved * size / whole)
    title = f"{Path(MODEL).name}, {str(dtype).removeprefix('torch.')}, {learning_rate:g}"
    return [
        median(f"{title}, numbers that changed", changed, "fraction"),
        median(f"{title}, bytes sent / whole", shares, "fraction"),
    ]


@click.command()
@click.option("--steps", default=4, help="updates that are measured, of each kind")
@click.option("--quick", is_flag=True, help="one update of each kind")
@click.option("--results-dir", default=str(results.FOLDER), help="where weight_delta.json goes")
def main(steps: int, quick: bool, results_dir: str) -> None:
    """Count the bytes of updates."""
    steps = 1 if quick else steps
    torch.set_num_threads(1)
    figures = [
        figure
        for dtype in (torch.bfloat16, torch.float32)
        for learning_rate in (1e-6, 1e-5, 1e-4)
        if dtype == torch.bfloat16 or learning_rate == 1e-6
        for figure in measure(learning_rate, dtype, num_steps=steps)
    ]
    click.echo(results.show(figures))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}")


if __name__ == "__main__":
    main()
