"""The arguments with which vLLM is started, so that its log-probabilities can be trained on."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import get_args

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from vllm.config import ModelConfig
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from async_grpo.config.roles import GENERATION, REWARD
from async_grpo.config.worker_config import WorkerConfig, check_known
from async_grpo.devices.bill import KV_BLOCK_TOKENS, WHOLE_SHARE, batched_on_cpu, cache_of_cpu
from async_grpo.model.foreign_folders import config_file, quantization_of
from async_grpo.model.model_folder import longrope_positions, read_config
from async_grpo.model.text_towers import is_tower, text_model
from async_grpo.rollout.scheduler import KEEP
from async_grpo.types.snapshots import NUM_ROWS
from async_grpo.util.errors import ConfigError
from async_grpo.weight_sync.vllm_extension import TEXT_TOWER

EXTENSION = "async_grpo.rollout.expert_choices.WorkerExtension"
TRANSFER_BACKEND = "staged_file"
SCHEDULER: str | None = "async_grpo.rollout.scheduler.make_scheduler"
# vLLM chooses defaults by it: without a server an engine on a device would get 2048 prompt tokens a
# step.
USAGE = UsageContext.OPENAI_API_SERVER
CPU_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # "uni" becomes "mp" on CPU
OVERHEAD_BYTES = 4 << 30  # activations, CUDA graphs and the context of an engine on a device


def engine_args(config: WorkerConfig) -> AsyncEngineArgs:
    """The arguments by the worker's options, and the arguments that training needs."""
    on_cpu = current_platform.is_cpu()
    dtype = config.dtype
    if dtype == "auto":  # vLLM's own choice would round a float32 model
        dtype = "float32" if on_cpu else "bfloat16"
    # An engine that takes longer rows would use LongRoPE's long factors for all rows.
    longest = config.max_model_len or longrope_positions(Path(config.model_path))
    args = AsyncEngineArgs(
        model=config.model_path,
        dtype=dtype,
        max_num_seqs=config.max_num_seqs or None,
        max_model_len=longest,
        tensor_parallel_size=config.tensor_parallel_size,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduler_cls=SCHEDULER,
        scheduling_policy="priority",  # then first come, first served; the canary goes before all
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30) or None,
        generation_config="vllm",  # nothing of the sampling comes from the model's folder
        logprobs_mode="processed_logprobs",  # at the sampling temperature
        hf_overrides={"head_dtype": "float32"},  # logits as the trainer computes them
        skip_tokenizer_init=False,  # grammars are made of its vocabulary; ids go in and out
        disable_log_stats=True,
        # By itself vLLM may take Ray's executor inside an actor, and another placement with it.
        distributed_executor_backend="mp" if config.tensor_parallel_size > 1 else None,
        worker_extension_cls=EXTENSION,
        weight_transfer_config={"backend": TRANSFER_BACKEND},
        additional_config={KEEP: config.keep_kv_cache},
    )
    if serves_text_alone(Path(config.model_path)):
        args.hf_overrides, args.load_format = text_alone, TEXT_TOWER
    if config.mode == GENERATION and config.max_lora_rank:
        args.enable_lora, args.max_loras = True, config.max_loras
        args.max_lora_rank = rank_for(config.max_lora_rank)
        # Else vLLM gives adapters to heads and experts, too: it cannot score prompts, the canary
        # among them, with a head's on a CPU, and has no experts' there.
        args.lora_target_modules = linear_names(Path(config.model_path))
        if args.max_num_seqs:
            args.max_num_seqs += NUM_ROWS  # see `SeatsForCanary`
    if config.mode == REWARD:  # its weights stay, and it samples nothing
        args.runner, args.scheduler_cls, args.scheduling_policy = "pooling", None, "fcfs"
    if on_cpu:
        _fit_to_cpu(args, config)
    else:
        args.enable_sleep_mode = config.colocated
        args.enable_return_routed_experts = args.create_model_config().is_moe
        if share := config.memory_share or share_for_cache(
            config, device_bytes=current_platform.get_device_total_memory
        ):
            args.gpu_memory_utilization = share
    set_engine_options(args, config.engine_options)
    return args


def serves_text_alone(folder: Path) -> bool:
    """Whether of a model of several inputs the text model serves; a judge's may be quantised."""
    return is_tower(config_file(folder)) and not quantization_of(folder)


def text_alone(config: PreTrainedConfig) -> PreTrainedConfig:
    """What vLLM makes of the config of a model of several inputs: its text model's."""
    text = text_model(config)
    text.head_dtype = "float32"
    return text


def rank_for(rank: int) -> MaxLoRARanks:
    """The least rank that vLLM has memory for, of those that hold adapters of `rank`.

    >>> [rank_for(rank) for rank in (1, 2, 16, 17, 512)]
    [1, 8, 16, 32, 512]
    """
    ranks: tuple[MaxLoRARanks, ...] = get_args(MaxLoRARanks)
    return next(each for each in ranks if each >= rank)


def linear_names(folder: Path) -> list[str]:
    """The last names of a model's linear layers but for its head, as peft's `all-linear`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(folder))
    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    return sorted({name.rpartition(".")[2] for name in linear})


def share_for_cache(config: WorkerConfig, *, device_bytes: Callable[[], int]) -> float:
    """The share of a device for the weights and a KV cache of `kv_cache_gib`; 0 without that.

    vLLM requires so much free memory before it considers the size of the cache.
    """
    if not config.kv_cache_gib:
        return 0.0
    files = Path(config.model_path).glob("*.safetensors")
    weights = sum(file.stat().st_size for file in files) / config.tensor_parallel_size
    needed = weights + config.kv_cache_gib * 2**30 + OVERHEAD_BYTES
    return min(needed / device_bytes(), WHOLE_SHARE)


def _fit_to_cpu(args: AsyncEngineArgs, config: WorkerConfig) -> None:
    args.max_num_seqs = config.capacity + (NUM_ROWS if args.enable_lora else 0)
    args.enforce_eager = True
    args.block_size = KV_BLOCK_TOKENS
    # A seeded request whose prompt is cut in two rewinds its generator. A CPU generator cannot, and
    # the engine would die.
    args.enable_chunked_prefill = False
    model = args.create_model_config()
    if model.is_hybrid or model.is_attention_free:  # states of a prefix are cached by chunks alone
        args.enable_prefix_caching = False
    args.max_num_batched_tokens = batched_on_cpu(model.max_model_len)
    if args.tensor_parallel_size == 1:
        args.distributed_executor_backend = CPU_EXECUTOR
    if args.kv_cache_memory_bytes is None:
        args.kv_cache_memory_bytes = cache_of_cpu(
            longest=model.max_model_len, token_bytes=_token_bytes(model)
        )


def _token_bytes(model: ModelConfig) -> int:
    """Bytes of the keys and values of one token in all layers."""
    numbers = 2 * model.get_total_num_kv_heads() * model.get_head_size()
    return model.hf_text_config.num_hidden_layers * numbers * model.dtype.itemsize


def set_engine_options(args: AsyncEngineArgs, options: Mapping[str, str]) -> None:
    """Set each option on `args`, parsed as on vLLM's command line.

    Raises `ConfigError` for a name that vLLM does not have, or a value that it does not take.
    """
    if not options:
        return
    check_known(options, {field.name for field in fields(args)})
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    for name, text in options.items():
        word = name.replace("_", "-")
        typed = {"true": f"--{word}", "false": f"--no-{word}"}.get(text.lower(), "")
        if f"--{word}" not in parser._option_string_actions:
            raise ConfigError(f"--engine-option {name} cannot be typed, got {text!r}: leave it out")
        if typed not in parser._option_string_actions:
            typed = f"--{word}={text}"
        try:
            value = getattr(parser.parse_args([typed]), name)
        except (ArgumentError, SystemExit) as error:
            raise ConfigError(
                f"--engine-option {name} must be as vLLM has it, got {text!r}: {error}"
            ) from None
        setattr(args, name, value)
