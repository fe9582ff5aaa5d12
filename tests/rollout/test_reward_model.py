"""A reward model in vLLM: its scores are transformers', and it is asked as any service is."""

import json
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from local_ray import local_ray
from tiny_models import save_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

from async_grpo.cluster.cluster import Cluster
from async_grpo.config.worker_config import WorkerConfig, check_services
from async_grpo.launch.actors import worker_kinds
from async_grpo.model.model_folder import check_reward_model, hash_model
from async_grpo.types import ServiceRequest
from async_grpo.types.message import packed, unpacked
from async_grpo.util.errors import ConfigError, UnfitModel, WorkerError

TOLERANCE = 1e-5
TEXTS = ["1+1=2", "9", "7*6=42;" * 30]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=512,
        pad_token_id=0, num_labels=1, eos_token_id=1,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # far from zero, where a sigmoid would show
        model.score.weight.mul_(20)
    model.save_pretrained(tmp_path / "model")
    return save_tokenizer(tmp_path / "model")


def expected(folder, token_ids):
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0, 0].item()


@pytest.mark.integration
@pytest.mark.slow  # an engine, as those of judges
def test_the_scores_of_texts_and_token_ids_are_those_of_transformers(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with local_ray(num_cpus=2, object_store_mib=200):
        (kind,) = worker_kinds(Cluster(), WorkerConfig(mode="reward", model_path=folder))
        worker = kind.start("r0")
        info = ray.get(worker.info.remote(), timeout=240)
        assert (info.role, info.capacity) == ("service:reward", 64.0)
        assert info.code == {"service reward": hash_model(folder)} and not info.vocab_size
        ids = [tokenizer(text)["input_ids"] for text in TEXTS]
        asked = [*TEXTS, ids[0], np.array(ids[2])]
        calls = [worker.answer.remote(ServiceRequest(packed(each))) for each in asked]
        scores = [unpacked(each) for each in ray.get(calls, timeout=240)]
        with pytest.raises(WorkerError, match="must read 1 to 512 tokens, got 600: shorten"):
            ray.get(worker.answer.remote(ServiceRequest(packed("7" * 600))), timeout=60)
        ray.kill(worker)
    wanted = [expected(folder, each) for each in (*ids, ids[0], ids[2])]
    assert max(map(abs, wanted)) > 1.5  # no probability
    assert np.abs(np.subtract(scores, wanted)).max() < TOLERANCE


def test_only_a_classifier_of_one_label_is_a_reward_model(folder):
    assert check_reward_model(folder).vocab_size == 128
    file = Path(folder, "config.json")
    stated = json.loads(file.read_text())
    for change, said in (
        ({"id2label": {"0": "bad", "1": "good"}}, "is a Qwen3ForSequenceClassification of 2: give"),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            "is a Qwen3ForCausalLM of 1: give a reward model",
        ),
    ):
        file.write_text(json.dumps(stated | change))
        with pytest.raises(UnfitModel, match=f"must serve a sequence classifier of one.*{said}"):
            check_reward_model(folder)


def test_a_reward_worker_is_a_service_with_a_model_and_devices():
    config = WorkerConfig(mode="reward", model_path="m", tensor_parallel_size=2)
    assert (config.role, config.num_devices, config.capacity) == ("service:reward", 2, 64)
    assert config.serves_model
    assert WorkerConfig(mode="reward", model_path="m", name="safe").role == "service:safe"
    check_services([config])
    with pytest.raises(ConfigError, match="must be given with --mode reward"):
        WorkerConfig(mode="reward")
