"""What vLLM is started with, here and on devices that are not here."""

import json
import shutil
from types import SimpleNamespace

import pytest
from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.rollout import engine_args as module
from async_grpo.rollout.engine_args import USAGE, engine_args


def platform(**device):
    facts = {"is_cpu": False, "is_tpu": False, "is_cuda": True} | device
    return SimpleNamespace(**{name: lambda value=value: value for name, value in facts.items()})


@pytest.fixture
def h100(monkeypatch):
    device = platform(get_device_total_memory=80 << 30, get_device_name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(module, "current_platform", device)
    monkeypatch.setattr(arg_utils, "current_platform", device)


def test_a_device_gets_the_sequences_and_tokens_of_vllms_own_server(h100, model_folder):
    args = engine_args(WorkerConfig(model_path=model_folder))
    assert (args.max_num_seqs, args.max_num_batched_tokens, args.dtype) == (None, None, "bfloat16")
    tokens, sequences = AsyncEngineArgs.get_batch_defaults(1)
    assert (sequences[USAGE], tokens[USAGE]) == (1024, 8192)


def test_who_gives_a_number_of_sequences_gets_it(h100, model_folder, monkeypatch):
    config = WorkerConfig(model_path=model_folder, max_num_seqs=7)
    assert engine_args(config).max_num_seqs == 7
    monkeypatch.undo()
    assert engine_args(config).max_num_seqs == 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_keeps_its_own_numbers_and_every_head_is_float32(model_folder, dtype):
    args = engine_args(WorkerConfig(model_path=model_folder, dtype=dtype))
    assert (args.max_num_seqs, args.max_num_batched_tokens) == (64, 4096)
    model = args.create_model_config()
    assert (str(model.dtype), str(model.head_dtype)) == (f"torch.{dtype}", "torch.float32")


@pytest.mark.parametrize(("given", "longest"), [(0, 96), (64, 64)])
def test_longrope_of_any_family_keeps_its_short_factors(given, longest, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    factors = [1.0] * (config["hidden_size"] // config["num_attention_heads"] // 2)
    config["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 96,
        "short_factor": factors, "long_factor": factors, "factor": 4.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    args = engine_args(WorkerConfig(model_path=str(folder), max_model_len=given))
    assert args.create_model_config().max_model_len == longest
