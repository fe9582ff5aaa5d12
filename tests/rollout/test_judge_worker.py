"""A judge with a model of its own, on a real engine: messages in, text and cost out."""

import pytest
import ray
from families import tokenizer_of
from local_ray import local_ray
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_grpo.cluster.cluster import Cluster
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.launch.actors import worker_kinds
from async_grpo.types import JudgeRequest

# An engine more, in each suite of `make test`, says little that scripted ones do not.
pytestmark = [pytest.mark.integration, pytest.mark.slow]
REQUEST = JudgeRequest(({"role": "user", "content": "Is it right?"},), 0.0, 16)


@pytest.fixture
def chat_model(tmp_path):
    tokenizer = tokenizer_of("qwen2_5")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path), tokenizer


def test_a_judge_serves_its_own_weights_and_says_what_its_answer_cost(chat_model):
    folder, tokenizer = chat_model
    with local_ray(num_cpus=2, object_store_mib=200):
        config = WorkerConfig(mode="judge", name="strict", model_path=folder, max_num_seqs=4)
        (kind,) = worker_kinds(Cluster(), config)
        worker = kind.start("j0")
        info = ray.get(worker.info.remote(), timeout=240)
        assert (info.role, len(info.model_hash)) == ("judge:strict", 64)
        answers = ray.get([worker.answer.remote(REQUEST) for _ in range(2)], timeout=240)
        ray.kill(worker)
    prompt = tokenizer.apply_chat_template(
        list(REQUEST.messages), add_generation_prompt=True, return_dict=False
    )
    assert answers[0] == answers[1]  # at temperature 0
    assert len(prompt) < answers[0].num_tokens <= len(prompt) + 16
