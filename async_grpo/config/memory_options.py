"""The options of memory and speed: how ranks compute, divide a model and send its weights."""

from __future__ import annotations

import re
from dataclasses import dataclass

from async_grpo.config.option import POSITIVE, Change, Options, option


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions(Options):
    """Precision, kernels, sharding and offload of the ranks, and the transport of weights."""

    loss_chunksize: int = option(1024, none=0, group="Memory and speed")
    """tokens whose logits exist at a time; 0: those of a whole minibatch"""
    mixed_precision: str = option("auto", choices=("auto", "no", "bf16"))
    """compute type; master weights are float32"""
    attention: str = option("auto", choices=("auto", "packed", "flash_attention_2"))
    """kernel of attention over packed rows: auto is packed, torch's own, by FlashAttention-3 where
    that is installed; flash_attention_2 needs flash-attn; each is checked before training"""
    fsdp_sharding_strategy: str = option(
        "FULL_SHARD", choices=("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
    )
    """FULL_SHARD gathers a layer's weights for its forward and again for its backward pass,
    SHARD_GRAD_OP keeps them in between: faster, in more memory; HYBRID_SHARD does as FULL_SHARD
    within groups of ranks, each of which has all of the model: gathers stay within a machine"""
    fsdp_shard_ranks: int = option(0)
    """ranks of a group of HYBRID_SHARD; 0: those of a machine"""
    offload: str = option("none", choices=("none", "optimizer", "parameters"))
    """what lies in the host's memory: AdamW's moments, which steps there (on a device 8 bytes less
    for each parameter of its shard); or parameters and gradients too (16 bytes); slower"""
    activation_checkpointing: str = option(
        "auto", choices=("auto", "on", "off"), bare="on", none="off"
    )
    """recompute activations in the backward pass; auto: where the bill of memory, which is logged
    at the start, exceeds what is free without it"""
    use_torch_compile: bool = option(False)
    """compile decoder layers and log-probabilities"""
    defer_gradient_sync: bool = option(False)
    """reduce gradients over ranks once a step instead of once a minibatch; costs a whole gradient
    in memory on each rank"""
    gpus_per_rank: float = option(1.0, must=POSITIVE, change=Change.INCIDENTAL)
    """share of a device, and of its memory, that a rank takes: below 1 workers may use the rest"""
    peak_tflops: str = option("auto", change=Change.INCIDENTAL)
    """TFLOP/s that a rank's device could do, by which mfu is told; measure: by products as the run
    starts; auto: measured on a device, and no mfu on a CPU"""
    weight_transport: str = option("object_store", choices=("object_store", "nccl"))
    """how weights travel to generation workers: Ray's object store, or NCCL between NVIDIA
    devices"""
    weight_delta: bool = option(False, change=Change.INCIDENTAL)
    """send workers only the numbers that changed since the weights they have, where these are few,
    as in bfloat16 at a learning rate of 1e-6; costs a copy of the weights in host memory, shared
    by the ranks, and one in each worker"""

    def check(self) -> None:
        """See `Options`."""
        if self.fsdp_shard_ranks and self.fsdp_sharding_strategy != "HYBRID_SHARD":
            raise self.refusal(
                "fsdp_shard_ranks",
                "needs --fsdp-sharding-strategy HYBRID_SHARD, else all ranks are one group",
                "give that too, or leave it out",
            )
        if self.gpus_per_rank > 1:
            raise self.refusal(
                "gpus_per_rank", "must be at most 1", "--nproc-per-node takes more devices"
            )
        if not re.fullmatch(r"auto|measure|\d*[1-9]\d*(\.\d+)?|\d*\.\d*[1-9]\d*", self.peak_tflops):
            rule = "must be auto, measure, or a positive number of TFLOP/s"
            raise self.refusal("peak_tflops", rule, "989 is that of an H100 in bf16")

    def chunk_size(self, num_tokens: int) -> int:
        """Tokens whose logits exist at a time, of the most of a minibatch."""
        return self.loss_chunksize or num_tokens

    @property
    def shard_ranks(self) -> int | None:
        """How many share one copy of the model; 0: all ranks; None: those of a machine."""
        if self.fsdp_sharding_strategy != "HYBRID_SHARD":
            return 0
        return self.fsdp_shard_ranks or None
