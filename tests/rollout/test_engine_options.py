"""vLLM's own options, typed by vLLM's own parser."""

from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.rollout.engine_args import set_engine_options, share_for_cache
from async_grpo.util.errors import ConfigError

MODEL = str(Path(__file__).parents[2] / "sample-data" / "tiny-countdown")


def with_options(**options):
    args = AsyncEngineArgs(model=MODEL)
    set_engine_options(args, options)
    return args


def test_values_have_the_types_of_vllm():
    args = with_options(
        kv_cache_dtype="fp8", enforce_eager="true", enable_chunked_prefill="False",
        max_num_batched_tokens="8k", max_logprobs="7", compilation_config='{"mode": 0}',
    )  # fmt: skip
    assert (args.kv_cache_dtype, args.enforce_eager, args.max_logprobs) == ("fp8", True, 7)
    assert args.enable_chunked_prefill is False and args.max_num_batched_tokens == 8000
    assert args.compilation_config.mode == 0


def test_without_options_nothing_changes():
    assert with_options() == AsyncEngineArgs(model=MODEL)


def test_a_cache_of_a_given_size_takes_the_share_of_itself_and_the_weights(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"")
    with (tmp_path / "a.safetensors").open("ab") as file:
        file.truncate(16 << 30)  # sparse

    def share(device_gib, **options):
        config = WorkerConfig(model_path=str(tmp_path), **options)
        return share_for_cache(config, device_bytes=lambda: device_gib << 30)

    assert share(80) == 0.0
    assert share(80, kv_cache_gib=20.0) == (16 + 20 + 4) / 80
    assert share(80, kv_cache_gib=20.0, tensor_parallel_size=2) == (8 + 20 + 4) / 80
    assert share(24, kv_cache_gib=20.0) == 0.92


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"enforce_egaer": "true"}, "is no option of vLLM, got enforce_egaer=true: the nearest is "
                                    "enforce_eager"),
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype must be as vLLM has it, got 'fp9': argument"),
        ({"max_logprobs": "many"}, "max_logprobs must be as vLLM has it, got 'many'"),
        ({"tokens_only": "true"}, "tokens_only cannot be typed"),
    ],
)  # fmt: skip
def test_unknown_names_and_values_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        with_options(**options)
