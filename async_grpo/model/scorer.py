"""The policy without gradients: log-probabilities of given outputs, under weights that can change.

Reference and teacher workers use it; it runs the trainer's forward, so that the two agree. Its
parameters may be shards of FSDP2's, one part of the model on each of several ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from async_grpo.model.attention import choose_attention
from async_grpo.model.collate import collate_pairs, split_by_row, to_device
from async_grpo.model.lm_head import Head
from async_grpo.model.loading import check_trainable, load_sharded
from async_grpo.model.logprobs import token_logprobs
from async_grpo.model.model_folder import check_model_folder
from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.model.weight_files import local_part, slices_of
from async_grpo.types import PackedMinibatch
from async_grpo.util.errors import WeightSyncError

CHUNK_SIZE = 1024  # tokens whose logits are in memory at a time
TokenIds = NDArray[np.int32]
FILLER = (np.zeros(1, np.int32), np.zeros(1, np.int32))  # of a rank without outputs


class Scorer:
    """A model, or this rank's shards of one, that scores packed outputs on one device."""

    def __init__(
        self,
        model_path: str,
        *,
        device: torch.device,
        dtype: str = "auto",
        mesh: DeviceMesh | None = None,
    ) -> None:
        """`dtype` auto: float32 on CPU, bfloat16 elsewhere. `mesh`: the ranks that share the model.

        With a mesh every rank must call the methods below together, each with outputs of its own.
        """
        if dtype == "auto":
            dtype = "float32" if device.type == "cpu" else "bfloat16"
        weights = getattr(torch, dtype)
        self.facts = check_model_folder(model_path)
        attention = choose_attention(device, dtype=weights)
        self.device = device
        alone = check_trainable(model_path, attention=attention, device=device, dtype=weights)
        policy = load_sharded(
            model_path,
            attention=attention,
            dtype=weights,
            device=device,
            shard=None if mesh is None else functools.partial(_shard, mesh=mesh),
            sequences_alone=alone,
        )
        self.policy = policy.eval().requires_grad_(False)
        self._has_all = False  # has loaded others in place of all of the folder's weights

    @property
    def head(self) -> Head:
        """The output layer; of a sharded model it is whole from a forward to `release`."""
        return self.policy.head

    def release(self) -> None:
        """Drop what a forward over a sharded model has gathered and left: embedding and head."""
        if self.is_sharded:
            self.policy.reshard()

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.policy, FSDPModule)

    @torch.no_grad()
    def score(
        self,
        pairs: Sequence[tuple[TokenIds, TokenIds]],
        *,
        temperature: float,
        width: int | None = None,
    ) -> list[NDArray[np.float32]]:
        """Log-probabilities [L] of every output token of each (prompt ids, output ids).

        Over the first `width` tokens of the vocabulary; None: all.
        """
        packed = self.packed(pairs)
        hidden = self.policy.hidden_states(packed)
        return self.logprobs(hidden, packed, temperature=temperature, width=width)

    def logprobs(
        self,
        hidden: torch.Tensor,
        packed: PackedMinibatch,
        *,
        temperature: float,
        width: int | None = None,
    ) -> list[NDArray[np.float32]]:
        """As `score`, of the last hidden states [N, H] of a forward over `packed`."""
        scored = token_logprobs(
            hidden,
            self.head.columns(slice(width)),
            packed.target_ids,
            temperature=temperature,
            chunk_size=CHUNK_SIZE,
        )
        return [part.float().cpu().numpy() for part in split_by_row(scored.logprobs, packed)]

    def packed(self, pairs: Sequence[tuple[TokenIds, TokenIds]]) -> PackedMinibatch:
        """The (prompt ids, output ids) packed on the device, for one forward."""
        packed = collate_pairs(pairs, share_prompts=self.policy.shares_prompts)
        return to_device(packed, self.device)

    @torch.no_grad()
    def load(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, rest_of_folder: bool = False
    ) -> None:
        """Replace all weights, by checkpoint names; `rest_of_folder`: the others stay as they were.

        Names and shapes are checked first. Raises `WeightSyncError`, which leaves the old weights.
        """
        received, own = dict(tensors), dict(hf_named_parameters(self.policy))
        if rest_of_folder and self._has_all:
            raise WeightSyncError(
                f"some weights may only be sent where the others are those of {self.facts.path}, "
                "all were sent before: start the worker again"
            )
        sent, held = ({name: tuple(t.shape) for name, t in of.items()} for of in (received, own))
        if rest_of_folder:
            held = {name: shape for name, shape in held.items() if name in sent}
        if differing := sorted({name for name, _ in sent.items() ^ held.items()}):
            name = differing[0]
            raise WeightSyncError(
                f"weights must be those of {self.facts.path} by name and shape, {len(differing)} "
                f"are not, first {name}: {held.get(name)} here, {sent.get(name)} sent; start the "
                "worker with the model that is trained"
            )
        self._has_all = not rest_of_folder
        for name in received:
            local_part(own[name]).copy_(received[name][slices_of(own[name])])


def _shard(policy: PolicyModel, *, mesh: DeviceMesh) -> None:
    """Shard each layer, and the rest with the root, whose forward is `hidden_states`."""
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    register_fsdp_forward_method(policy, "hidden_states")
