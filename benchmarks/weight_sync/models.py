"""Random models of a few sizes, in folders that vLLM and transformers load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import shard
from async_grpo.types import CanaryRow
from benchmarks.weight_sync.tokenizer import write_tokenizer

LONGEST = 256  # tokens of prompt and output: all of it is computed again after an update
CANARY_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a Qwen3; heads of 64 dimensions, two of them to a key head."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    tied: bool

    def make(self, folder: Path) -> Qwen3ForCausalLM:
        """The float32 model with random weights, saved in `folder` with a tokenizer."""
        heads = self.hidden // 64
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=64,
            max_position_embeddings=LONGEST,
            tie_word_embeddings=self.tied,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
        model = Qwen3ForCausalLM(config).to(torch.float32).eval()
        disable_progress_bar()
        model.save_pretrained(folder)
        write_tokenizer(folder)
        return model


SIZES: Mapping[str, Size] = {
    "3M tied": Size(2_048, 256, 768, 3, tied=True),
    "27M untied": Size(8_192, 512, 1_536, 6, tied=False),
    "110M tied": Size(32_768, 768, 2_304, 12, tied=True),
    "135M untied": Size(32_768, 768, 2_304, 12, tied=False),
}


class Policy:
    """A trainer's side of a sync: one rank, sharded as in a run, with other weights each time."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._model = model
        self.policy = shard(PolicyModel(model), init_device_mesh("cpu", (1,)))
        rng = np.random.default_rng(0)
        self._row = rng.integers(3, 75, CANARY_TOKENS).astype(np.int32)

    @property
    def size_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.policy.parameters())

    @torch.no_grad()
    def change(self) -> None:
        """So that an engine that still served the old weights would be found out."""
        for parameter in self._model.base_model.norm.parameters():
            parameter.mul_(1.25)

    @torch.no_grad()
    def canary(self) -> tuple[CanaryRow, ...]:
        """What a run sends to be scored by the engine right after the update."""
        ids = torch.from_numpy(self._row.astype(np.int64))
        self.policy.unshard()
        logprobs = self._model(ids[None]).logits[0, :-1].log_softmax(-1)
        scores: NDArray[np.float32] = logprobs.gather(1, ids[1:, None])[:, 0].numpy()
        return (CanaryRow(self._row, scores),)
