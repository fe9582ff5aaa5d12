"""How a generation worker's engine is set up; light enough for the process that starts workers."""

from __future__ import annotations

from dataclasses import dataclass

# vLLM reads these while it is imported, so they must be set before a worker's process begins.
WORKER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # A second thread on a busy core makes the engine 10-20 times slower.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# The first request would compile for seconds; on a GPU compiling is worth it.
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One vLLM engine."""

    model_path: str  # a local Hugging Face folder
    dtype: str = "auto"  # auto: float32 on CPU, bfloat16 elsewhere
    max_num_seqs: int = 64
    max_model_len: int = 0  # prompt + output, in tokens; 0: the model's own limit
    tensor_parallel_size: int = 1
    kv_cache_gib: float = 0.0  # 0: 0.25 or one longest sequence on CPU, vLLM's choice elsewhere
    enable_prefix_caching: bool = True
    seed: int = 0


def worker_environment(*, on_cpu: bool = True) -> dict[str, str]:
    """Environment variables for the process of a `GenerationWorker` (Ray's `env_vars`)."""
    return WORKER_ENVIRONMENT | (CPU_ENVIRONMENT if on_cpu else {})
