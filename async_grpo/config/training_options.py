"""The options of a trainer rank: optimizer, schedule, adapters, precision, sharding, transport."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from async_grpo.config.option import POSITIVE, Change, Options, names_in, option

MAX_LEARNING_RATE = 1e-2
CLOCKS = ("steps", "samples", "tokens")
# What peft would do at the start, for which there is a frozen base that stays as it is.
ALTERS_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
# Options of every adapter, also of one that is gone on with.
OF_ANY = (
    "base_quantization",
    "adapter_path",
    "adapter_reference",
    "adapter_publication",
    "export_merged",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions(Options):
    """AdamW, its learning rate, and gradient clipping."""

    learning_rate: float = option(1e-6, change=Change.LIVE, group="Learning rate and optimizer")
    """peak learning rate of AdamW"""
    optim: str = option(
        "adamw",
        choices=("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"),
        change=Change.FIXED,
    )
    """adamw: torch's; on devices bitsandbytes' with moments in 8 bits (arXiv 2110.02861), in memory
    that moves to the host's where a device has too little, or both"""
    lr_scheduler: str = option(
        "constant_with_warmup",
        choices=("constant", "constant_with_warmup", "linear", "cosine"),
    )
    """learning-rate schedule"""
    schedule_clock: str = option("steps", choices=CLOCKS)
    """what the schedule counts: gradient steps taken, or the samples or output tokens of these"""
    num_schedule_tokens: int = option(0)
    """trained tokens at which linear and cosine end, for --schedule-clock tokens"""
    num_warmup_steps: int = option(0)
    """gradient steps of linear warm-up"""
    num_warmup_samples: int = option(0)
    """samples of linear warm-up, for --schedule-clock samples"""
    num_warmup_tokens: int = option(0)
    """trained tokens of linear warm-up, for --schedule-clock tokens"""
    warmup_ratio: float = option(0.0)
    """linear warm-up as a share of the planned steps, samples or tokens, instead of a number"""
    min_learning_rate_ratio: float = option(0.0)
    """share of --learning-rate at which linear and cosine end"""
    adam_beta1: float = option(0.9)
    """first moment decay of AdamW"""
    adam_beta2: float = option(0.95)
    """second moment decay of AdamW"""
    adam_epsilon: float = option(1e-8, must=POSITIVE)
    """epsilon of AdamW"""
    weight_decay: float = option(0.0)
    """decoupled weight decay of AdamW"""
    max_grad_norm: float = option(1.0)
    """clip of the global gradient norm; 0: no clipping"""
    allow_high_learning_rate: bool = option(False, change=Change.INCIDENTAL)
    """take a --learning-rate above 0.01 as meant"""

    @property
    def num_warmup(self) -> int:
        """Warm-up as a number of `schedule_clock`; 0: none, or a share."""
        found: int = getattr(self, f"num_warmup_{self.schedule_clock}")
        return found

    def check(self) -> None:
        """See `Options`."""
        if self.learning_rate > MAX_LEARNING_RATE and not self.allow_high_learning_rate:
            raise self.refusal(
                "learning_rate",
                f"must be at most {MAX_LEARNING_RATE:g}, "
                "3 was seen to destroy the policy in one step",
                "1e-6 to 1e-5 is usual (1e-6, not 1); "
                "--allow-high-learning-rate takes it all the same",
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        """Raise `ConfigError` for a warm-up or an end that the schedule does not have."""
        for clock in CLOCKS:
            if clock != self.schedule_clock and getattr(self, f"num_warmup_{clock}"):
                raise self.refusal(
                    f"num_warmup_{clock}",
                    f"goes with --schedule-clock {clock}",
                    f"set the clock, or use --num-warmup-{self.schedule_clock}",
                )
        if self.warmup_ratio and self.num_warmup:
            raise self.refusal(
                "warmup_ratio",
                f"must not stand beside --num-warmup-{self.schedule_clock}",
                "give the share or the number",
            )
        ends = self.lr_scheduler in ("linear", "cosine") or bool(self.warmup_ratio)
        if bool(self.num_schedule_tokens) != (ends and self.schedule_clock == "tokens"):
            raise self.refusal(
                "num_schedule_tokens",
                "goes with --schedule-clock tokens and an end to count to, of linear, cosine or "
                "--warmup-ratio, and these need it: how long outputs get nobody knows before",
                "give all of them, for example with batches x questions x samples x mean length",
            )
        if self.warmup_ratio and self.lr_scheduler == "constant":
            raise self.refusal(
                "warmup_ratio",
                "needs a --lr-scheduler that warms up",
                "constant_with_warmup is one",
            )
        if self.min_learning_rate_ratio and self.lr_scheduler not in ("linear", "cosine"):
            raise self.refusal(
                "min_learning_rate_ratio",
                f"needs --lr-scheduler linear or cosine ({self.lr_scheduler} never falls)",
                "choose one of these, or leave it out",
            )
        for name in ("warmup_ratio", "min_learning_rate_ratio"):
            if getattr(self, name) > 1:
                raise self.refusal(name, "must be in [0, 1]", "0.1 is usual")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions(Options):
    """A low-rank adapter (LoRA, arXiv 2106.09685) in place of training every parameter."""

    lora_rank: int = option(0, change=Change.FIXED, group="Low-rank adapters")
    """train an adapter of this rank by peft, and leave the model's own parameters as they are; 0:
    all parameters are trained, or the adapter of --adapter-path"""
    lora_alpha: float = option(0.0, change=Change.FIXED)
    """what a layer's adapter adds is scaled by alpha / rank; 0: alpha is twice the rank"""
    lora_targets: str = option("all-linear", change=Change.FIXED)
    """layers with an adapter: all-linear (but for the output layer), names such as q_proj,v_proj,
    or a regular expression that whole names of modules match"""
    lora_init: str = option("default", change=Change.FIXED)
    """start of an adapter's first factor, drawn from --infinite-sampler-seed: default (uniform) or
    gaussian; the second is 0, so that the policy starts as the model"""
    use_rslora: bool = option(False, change=Change.FIXED)
    """scale by alpha / sqrt(rank) (rank-stabilised, arXiv 2312.03732)"""
    use_dora: bool = option(False, change=Change.FIXED)
    """train the norms of weights apart from their directions (DoRA, arXiv 2402.09353)"""
    modules_to_save: str = option("", none="", change=Change.FIXED)
    """names of modules trained as a whole beside the adapter, separated by commas"""
    base_quantization: str = option("none", choices=("none", "nf4", "int8"), change=Change.FIXED)
    """how a trainer rank on a device holds the frozen weights under the adapter (QLoRA, arXiv
    2305.14314): nf4 in 4.5 bits a number, int8 in 8.5, all of them on each rank, or none; of a
    folder that `async-grpo quantize` wrote, which all roles take"""
    adapter_path: str = option("", none="", change=Change.FIXED)
    """folder of an adapter in peft's format to go on with, whose rank and targets count"""
    adapter_reference: str = option("trainer", choices=("trainer", "worker"), change=Change.FIXED)
    """who scores samples with the run's first policy for a KL penalty in the loss: the trainer
    itself, or a reference worker"""
    adapter_publication: str = option(
        "auto", choices=("auto", "merged", "adapter"), change=Change.INCIDENTAL
    )
    """what generation workers are sent: weights with the adapter merged into them, or the adapter
    alone, for workers with --max-lora-rank; auto: the adapter where all workers and it allow it"""
    export_merged: bool = option(False)
    """exports are whole models, with the adapter merged into their weights; else adapters"""

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter trains, and nothing else of the model."""
        return bool(self.lora_rank or self.adapter_path)

    @property
    def stated(self) -> Mapping[str, Any]:
        """What the options say of an adapter of `lora_rank`, by peft's names."""
        is_named = re.fullmatch(r"[\w.,\s-]+", self.lora_targets)
        targets = [*names_in(self.lora_targets)] if is_named else self.lora_targets
        return {
            "r": self.lora_rank,
            "lora_alpha": self.lora_alpha or 2 * self.lora_rank,
            "target_modules": "all-linear" if targets == ["all-linear"] else targets,
            "init_lora_weights": "gaussian" if self.lora_init == "gaussian" else True,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "modules_to_save": [*names_in(self.modules_to_save)] or None,
        }

    def check(self) -> None:
        """See `Options`."""
        if self.lora_init.lower().startswith(ALTERS_BASE):
            rule = "must leave the model's own weights as they are, which engines and exports share"
            raise self.refusal("lora_init", rule, "choose default or gaussian")
        if self.lora_init not in ("default", "gaussian"):
            raise self.refusal("lora_init", "must be default or gaussian", "choose one")
        if self.lora_rank and self.adapter_path:
            rule = "must not stand beside --lora-rank: the adapter there has its own"
            raise self.refusal("adapter_path", rule, "leave one of the two out")
        if self.base_quantization != "none" and self.use_dora:
            rule = "must be none with --use-dora, which needs the norms of whole weights"
            raise self.refusal("base_quantization", rule, "leave one of the two out")
        for each in fields(self):
            belongs = self.lora_rank or (each.name in OF_ANY and self.adapter_path)
            if getattr(self, each.name) != each.default and not belongs:
                rule, remedy = "goes with --lora-rank", "give that too, or leave it out"
                raise self.refusal(each.name, rule, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions(Options):
    """Precision, kernels, sharding and offload of the ranks, and the transport of weights."""

    loss_chunksize: int = option(1024, none=0, group="Memory and speed")
    """tokens whose logits exist at a time; 0: those of a whole minibatch"""
    mixed_precision: str = option("auto", choices=("auto", "no", "bf16"))
    """compute type; master weights are float32"""
    attention: str = option("auto", choices=("auto", "packed", "flash_attention_2"))
    """kernel of attention over packed rows: auto is packed, torch's own, by FlashAttention-3 or 4
    where one is installed; flash_attention_2 needs flash-attn; each is checked before training"""
    fsdp_sharding_strategy: str = option(
        "FULL_SHARD", choices=("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "ZERO1")
    )
    """FULL_SHARD gathers a layer's weights for its forward and again for its backward pass,
    SHARD_GRAD_OP keeps them in between: faster, in more memory; HYBRID_SHARD does as FULL_SHARD
    within groups of ranks, each of which has all of the model: gathers stay within a machine;
    NO_SHARD: every rank has all of the model, its gradients and AdamW's moments, and only adds up
    gradients; ZERO1: so too, but the moments are divided among the ranks"""
    fsdp_shard_ranks: int = option(0)
    """ranks of a group of HYBRID_SHARD; 0: those of a machine"""
    offload: str = option("none", choices=("none", "optimizer", "parameters"))
    """what lies in the host's memory: AdamW's moments, which steps there (on a device 8 bytes less
    for each parameter of its shard); or parameters and gradients too (16 bytes); slower"""
    activation_checkpointing: str = option(
        "auto", choices=("auto", "on", "off"), bare="on", none="off"
    )
    """recompute activations in the backward pass; auto: those of as few layers as make the bill of
    memory, which is logged at the start, fit into what is free"""
    use_torch_compile: bool = option(False)
    """compile decoder layers and log-probabilities, if a small random model computes the same so"""
    use_liger_kernel: bool = option(False)
    """on a device, compute norms, rotary embedding and activation by the fused kernels of
    liger-kernel, if a small random model computes the same by them, forward and backward"""
    defer_gradient_sync: bool = option(False)
    """reduce gradients over ranks once a step instead of once a minibatch; costs a whole gradient
    in memory on each rank"""
    gpus_per_rank: float = option(1.0, must=POSITIVE, change=Change.INCIDENTAL)
    """share of a device, and of its memory, that a rank takes: below 1 workers may use the rest"""
    colocated: bool = option(False)
    """ranks and generation workers have the same devices in turns: engines sleep while a batch is
    trained, and the ranks' weights and moments wait in the host's memory while they sample"""
    unchecked_memory: bool = option(False, change=Change.INCIDENTAL)
    """start though the bill of memory says that a device or a machine holds too little"""
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
        if self.fsdp_sharding_strategy == "ZERO1" and self.offload == "parameters":
            raise self.refusal(
                "offload",
                "must leave parameters where ZERO1 gathers them",
                "give --offload optimizer, or --fsdp-sharding-strategy FULL_SHARD",
            )
        if self.colocated and self.weight_transport != "object_store":
            rule = "must be object_store with --colocated: NCCL needs a device for every process"
            raise self.refusal("weight_transport", rule, "leave it out")
        if self.gpus_per_rank > 1:
            raise self.refusal(
                "gpus_per_rank", "must be at most 1", "--nproc-per-node takes more devices"
            )
        if not re.fullmatch(r"auto|measure|\d*[1-9]\d*(\.\d+)?|\d*\.\d*[1-9]\d*", self.peak_tflops):
            rule = "must be auto, measure, or a positive number of TFLOP/s"
            raise self.refusal("peak_tflops", rule, "989 is that of an H100 in bf16")

    def chunk_size(self, num_tokens: int) -> int:
        """Tokens whose logits are in memory at a time, for a minibatch of at most `num_tokens`."""
        return self.loss_chunksize or num_tokens

    @property
    def shard_ranks(self) -> int | None:
        """Ranks that share one copy of the model; 0: all ranks; None: those of one machine."""
        if self.fsdp_sharding_strategy == "HYBRID_SHARD":
            return self.fsdp_shard_ranks or None
        return 1 if self.fsdp_sharding_strategy in ("NO_SHARD", "ZERO1") else 0
