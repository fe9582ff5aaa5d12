"""What this rank computed of each token that it trained, written for people to read.

Beside the dump of samples lies a file a rank, `samples.rank_0.jsonl`, with a line for each row:
what becomes of a token's weight can be recomputed from it (`async-grpo rollouts`).
"""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from async_grpo.config.train_config import TrainConfig
from async_grpo.model.collate import split_by_row
from async_grpo.telemetry.sample_dump import UNLIMITED, SampleDump, tokens_file
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep, Minibatch, PackedMinibatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class TokenTerms:
    """Of the trained tokens of one minibatch, on the device; [N] each."""

    logprobs: Tensor  # the policy's, when it was trained
    old: Tensor | None  # the policy's at the start of the batch, where it has moved since
    gradients: Tensor | None  # of the minibatch's plain sum, by each log-probability


class TokenDump:
    """Keeps one step's minibatches, and writes their tokens when it has ended."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        """All ranks' files together may be as large as the dump."""
        self._config = config
        self._rank = ranks.rank
        path = tokens_file(
            Path(config.recording.output_dir, config.recording.dump_samples_filename), ranks.rank
        )
        max_bytes = config.recording.dump_max_gib * 2**30 / ranks.world_size or UNLIMITED
        self._dump = SampleDump(path, max_bytes=max_bytes, unit="rows")
        self._is_new = True
        self._kept: list[tuple[Minibatch, PackedMinibatch]] = []

    @classmethod
    def of(cls, config: TrainConfig, ranks: Ranks) -> TokenDump | None:
        """None where the run dumps no token."""
        is_wanted = config.recording.dump_token_columns and config.recording.dump_samples_filename
        return cls(config, ranks) if is_wanted else None

    def keep(self, minibatch: Minibatch, packed: PackedMinibatch) -> None:
        """Remember a minibatch, as it is packed, until its step has ended."""
        self._kept.append((minibatch, packed))

    def discard(self) -> None:
        """The step is not finished: all of it will come again."""
        self._kept = []

    def end_step(self, end: EndOfStep, terms: list[TokenTerms], *, step: int) -> None:
        """Write what was computed of each minibatch that was kept, in their order."""
        if self._is_new:  # what a run that goes on has trained since its checkpoint
            self._is_new = False
            within = end.step_in_batch * self._config.batching.questions_per_step
            self._dump.cut_back(end.batch * self._config.batching.batch_size + within)
        for (minibatch, packed), own in zip(self._kept, terms, strict=True):
            if minibatch.samples:
                self._dump.write(self._lines(minibatch, packed, own, end.batch, step))
        self._kept = []
        for notice in self._dump.take_notices():
            logger.warning("%s", notice)

    def _lines(
        self,
        minibatch: Minibatch,
        packed: PackedMinibatch,
        terms: TokenTerms,
        batch: int,
        step: int,
    ) -> list[dict[str, object]]:
        """`viewing.page.dump` reads the first five fields without the rest."""
        values = {"logprobs": terms.logprobs, "old": terms.old, "gradients": terms.gradients}
        rows = {
            name: split_by_row(each.cpu(), packed)
            for name, each in values.items()
            if each is not None
        }
        parts = [part for sample in minibatch.samples for part in sample.parts()]
        return [
            {
                "batch": batch,
                "ordinal": part.ordinal,
                "attempt": part.attempt,
                "index": part.index,
                "row": part.row,
                "step": step,
                "round": minibatch.round_index,
                "rank": self._rank,
                **{name: as_text(rows[name][number]) for name in rows},
            }
            for number, part in enumerate(parts)
        ]


def as_text(values: Tensor) -> str:
    """Float32 in base64, as exact as they are, at 6 bytes each: text would cost a step seconds.

    >>> as_text(torch.tensor([1.0, -0.5]))
    'AACAPwAAAL8='
    """
    return base64.b64encode(values.to(torch.float32).numpy().tobytes()).decode()
