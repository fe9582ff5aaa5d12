"""What TRL 1.16 needs to drive vLLM's CPU build: it was written for devices, and for older vLLMs.

Two calls are replaced and nothing of what TRL computes: the engine's arguments (TRL gives it a
share of a device's memory; here a KV cache of a fixed size, float32, no compilation, as our own
engine has), and the loading of new weights, which `load_weights` alone cannot do where vLLM has
packed them for the CPU.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

KV_CACHE_BYTES = 256 << 20
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # TRL reaches into the engine for its model
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
}


def fit_to_cpu() -> None:
    """Before TRL's trainer is imported."""
    os.environ.update(ENVIRONMENT)
    from trl.generation import vllm_generation

    vllm_generation.LLM = partial(_make_engine, vllm_generation.LLM)
    vllm_generation.VLLMGeneration.sync_weights = _load_weights  # type: ignore[method-assign]


def _make_engine(llm: Any, **arguments: Any) -> Any:
    arguments |= {
        "enforce_eager": True,
        "dtype": "float32",
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "skip_tokenizer_init": True,  # prompts and answers are token ids
        "generation_config": "vllm",
    }
    return llm(**arguments)


def _load_weights(generation: Any) -> None:
    """TRL's `sync_weights` for an engine of the same process."""
    import torch
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    weights = {name: value.detach() for name, value in generation._iter_named_params()}
    with torch.no_grad():
        for module in runner.model.modules():
            vars(module).pop("cpu_linear", None)  # packed copies, which a reload would leak
        initialize_layerwise_reload(runner.model)
        runner.model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(runner.model, runner.model_config)
        head = runner.model.lm_head
        if head.weight is runner.model.model.embed_tokens.weight:  # packed once, and never again
            head.quant_method.process_weights_after_loading(head)
    generation.llm.reset_prefix_cache()
