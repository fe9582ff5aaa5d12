"""`--engine-option KEY=VALUE`: which of vLLM's own options a user may set."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from fnmatch import fnmatch

from async_grpo.config.option import flag
from async_grpo.util.errors import ConfigError

OURS = {  # vLLM's name: our option
    "model": "model_path",
    "revision": "model_revision",
    "kv_cache_memory_bytes": "kv_cache_gib",
    **{
        name: name
        for name in (
            "dtype", "enable_prefix_caching", "gpu_memory_utilization", "max_model_len",
            "max_num_seqs", "tensor_parallel_size",
        )
    },
}  # fmt: skip
# Patterns of vLLM's names, and why nobody but we may set them.
CONTRACT = "it would change what tokens or log-probabilities mean, and the trainer would not know"
WEIGHTS = "weights of the trainer could not be loaded into such an engine, or from there"
PROCESSES = "workers are placed and supervised here"
REFUSED = {
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logprobs_mode", "logits_processors",
         "spec*", "watermark*", "seed", "tokenizer*", "skip_tokenizer_init", "scheduler_cls",
         "scheduling_policy", "return_sampling_mask", "diffusion_config", "runner", "convert",
         "stream_interval"),
        CONTRACT,
    ),
    **dict.fromkeys(
        ("hf_*", "quantization*", "allow_deprecated_quantization", "load_format", "model_*",
         "*lora*", "disable_sliding_window", "weight_transfer_config", "enable_sleep_mode",
         "sleep_*", "offload_*", "cpu_offload*", "trust_remote_code", "code_revision"),
        WEIGHTS,
    ),
    **dict.fromkeys(
        ("data_parallel*", "pipeline_parallel*", "prefill_context*", "decode_context*", "nnodes",
         "node_rank", "master_*", "device_ids", "distributed_executor_backend", "worker_*",
         "_*", "disable_log_stats", "ray_*", "additional_config"),
        PROCESSES,
    ),
}  # fmt: skip


def parse_engine_options(text: str) -> Mapping[str, str]:
    """{vLLM's name: what was typed} of KEY=VALUE lines; raises `ConfigError` for what is refused.

    >>> parse_engine_options("kv-cache-dtype = fp8")
    {'kv_cache_dtype': 'fp8'}
    """
    options = {}
    for line in text.splitlines():
        key, is_given, value = line.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not (is_given and key.isidentifier()):
            raise ConfigError(
                f"--engine-option must be KEY=VALUE, got {line!r}: for example "
                "--engine-option kv_cache_dtype=fp8"
            )
        if key in OURS:
            remedy = f"has an option of its own here: give {flag(OURS[key])}"
            raise ConfigError(f"--engine-option {key} {remedy}, got {line!r}")
        for pattern, why in REFUSED.items():
            if fnmatch(key, pattern):
                raise ConfigError(f"--engine-option {key} is refused, got {line!r}: {why}")
        options[key] = value.strip()
    return options


def check_known(options: Mapping[str, str], known: Collection[str]) -> None:
    """Raise `ConfigError` for an option that is none of vLLM's, whose names are `known`.

    >>> check_known({"kv_cache_dtyp": "fp8"}, ["block_size", "kv_cache_dtype"])
    Traceback (most recent call last):
    async_grpo.util.errors.ConfigError: --engine-option kv_cache_dtyp is no option of vLLM, got \
kv_cache_dtyp=fp8: the nearest is kv_cache_dtype
    """
    for name, text in options.items():
        if name not in known:
            [nearest] = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"--engine-option {name} is no option of vLLM, got {name}={text}: the nearest is "
                f"{nearest}"
            )
