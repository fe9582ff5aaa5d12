"""Options of dispatchers: what is refused, in which words."""

import pytest

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.util.errors import ConfigError


def make_config(**options):
    return WorkerConfig(model_path="m", **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpus_per_worker": 2.0}, r"--gpus-per-worker must be at most 1, got 2.0: --tensor-paral"),
        (
            {"max_lora_rank": 513},
            r"at most 512, which vLLM serves, got 513: train a smaller --lora-",
        ),
        ({"max_lora_rank": 8, "mode": "logprob"}, "must be 0 with --mode logprob, got 8"),
        ({"max_loras": 0}, "--max-loras must be at least 1"),
        ({"gpus_per_worker": 0.0}, "--gpus-per-worker must be positive"),
        ({"gpus_per_worker": 0.5, "tensor_parallel_size": 2}, "must be 1 with --tensor-parallel"),
        ({"gpu_memory_utilization": 92.0}, "--gpu-memory-utilization must be at most 1, got 92.0"),
        ({"engine_option": "fp8"}, "--engine-option must be KEY=VALUE, got 'fp8'"),
        ({"engine_option": "a=1\n=2"}, "--engine-option must be KEY=VALUE, got '=2'"),
        ({"engine_option": "max-num-seqs=9"}, "has an option of its own here: give --max-num-seqs"),
        ({"engine_option": "logprobs_mode=raw_logits"}, "log-probabilities mean"),
        ({"engine_option": "speculative_config={}"}, "log-probabilities mean"),
        ({"engine_option": "quantization=fp8"}, "weights of the trainer could not be loaded"),
        ({"engine_option": "hf_overrides={}"}, "weights of the trainer could not be loaded"),
        ({"engine_option": "pipeline_parallel_size=2"}, "workers are placed and supervised here"),
    ],
)
def test_what_a_device_or_the_contract_does_not_admit_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_config(**options)


def test_options_of_the_engine_are_kept_as_typed():
    config = make_config(engine_option="kv-cache-dtype=fp8\nenforce_eager = true")
    assert config.engine_options == {"kv_cache_dtype": "fp8", "enforce_eager": "true"}


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 0.0),
        ({"gpus_per_worker": 0.3}, 0.3),
        ({"gpu_memory_utilization": 0.8}, 0.8),
        ({"gpus_per_worker": 0.3, "gpu_memory_utilization": 0.2}, 0.2),
    ],
)
def test_a_worker_of_a_shared_device_takes_its_share_of_the_memory(options, share):
    assert make_config(**options).memory_share == share


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"tensor_parallel_size": 4}, 4),
        ({"mode": "logprob", "tensor_parallel_size": 4}, 1),
        ({"mode": "environment"}, 0),
        ({"mode": "verifier"}, 0),
    ],
)
def test_each_mode_takes_its_devices(options, devices):
    assert make_config(**options).num_devices == devices
