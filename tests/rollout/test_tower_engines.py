"""An engine serves the text model in a folder of one that also takes images, and takes updates."""

import asyncio
import json
import os

import numpy as np
import pytest
import torch
from engine_stack import (
    LONG_PROMPT,
    TEMPERATURE,
    fetch,
    make_request,
    until_all_have_tokens,
)
from tiny_models import save_tokenizer, snapshot_of
from tower_models import TOWERS, save_tower

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate_pairs
from async_grpo.model.loading import load_policy
from async_grpo.rollout.engine_args import serves_text_alone
from async_grpo.rollout.generation_worker import worker_environment

pytestmark = pytest.mark.integration
TOLERANCE = 5e-5  # nats in float32
SIZES = {"vocab_size": 128, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2,
         "num_key_value_heads": 1, "pad_token_id": 0}  # fmt: skip
# vLLM imports Qwen 3.5's text model with its vision, which needs torchvision.
SERVED = [
    pytest.param(kind, marks=[] if kind == "gemma3" else pytest.mark.slow)
    for kind in TOWERS
    if not kind.startswith("qwen")
]


@pytest.mark.parametrize("kind", SERVED)
def test_log_probabilities_are_the_policy_s_before_and_after_an_update_in_flight(
    kind, tmp_path, monkeypatch
):
    for name, value in worker_environment().items():
        monkeypatch.setitem(os.environ, name, value)
    from async_grpo.rollout.engine import Engine

    sizes = SIZES | {"max_position_embeddings": 512}
    if kind == "gemma4":
        sizes |= {"global_head_dim": 32, "vocab_size_per_layer_input": 128}
    save_tower(kind, tmp_path, **sizes)
    save_tokenizer(tmp_path)
    policy = load_policy(str(tmp_path), attention=PACKED, dtype=torch.float32)

    def published(version):
        return snapshot_of(policy.model.named_parameters(), version)

    async def update_in_flight():
        running = asyncio.create_task(engine.generate(make_request(max_tokens=200, stop=())))
        await until_all_have_tokens(engine, 10)
        await engine.load(published(1), fetch)
        return await running

    with asyncio.Runner() as runner:
        engine = Engine(WorkerConfig(model_path=str(tmp_path), max_num_seqs=4))
        try:
            runner.run(engine.load(published(0), fetch))
            assert difference(policy, runner.run(engine.generate(make_request()))) < TOLERANCE
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.03)
            for turn in runner.run(update_in_flight()):
                assert len(turn.weights_versions) == 2
            assert difference(policy, runner.run(engine.generate(make_request()))) < TOLERANCE
            (unreadable,) = runner.run(engine._llm.collective_rpc("unreadable_weights"))
            assert all(".per_layer_" in name for name in unreadable)  # Gemma 4's, packed on CPUs
        finally:
            engine._llm.shutdown()


@torch.no_grad()
def difference(policy, turns):
    """Largest, in nats, over the tokens of these outputs."""
    packed = collate_pairs([(LONG_PROMPT, turn.token_ids) for turn in turns], share_prompts=True)
    scored = policy(packed, temperature=TEMPERATURE, chunk_size=64).logprobs.numpy()
    return np.abs(scored - np.concatenate([turn.logprobs for turn in turns])).max()


def test_a_judge_serves_a_quantised_folder_as_it_is(tmp_path):
    save_tower("gemma3", tmp_path)
    (config,) = tmp_path.glob("config.json")
    assert serves_text_alone(tmp_path)
    stated = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "awq"}}
    config.write_text(json.dumps(stated))
    assert not serves_text_alone(tmp_path)
    without = {"architectures": ["Qwen2VLForConditionalGeneration"], "text_config": {}}
    config.write_text(json.dumps(without))
    assert not serves_text_alone(tmp_path)
