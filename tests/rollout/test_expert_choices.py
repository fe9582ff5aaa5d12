"""A mixture of experts in vLLM itself: its choices, and its weights, are those that are trained."""

import asyncio
import os
from dataclasses import replace

import family_engines
import numpy as np
import pytest
import torch
from engine_stack import LONG_PROMPT, TEMPERATURE, fetch, make_request
from tiny_models import canary_of, snapshot_of
from transformers import CONFIG_MAPPING

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate_pairs
from async_grpo.model.loading import load_policy
from async_grpo.rollout.generation_worker import worker_environment
from async_grpo.types import CanaryRow, WeightsAck, WeightsVersion
from async_grpo.weight_sync.sync_report import routing_mismatch

pytestmark = pytest.mark.integration
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
SLOW = pytest.mark.slow
NEARLY_EQUAL = 0.01  # scores of two experts may be so close that rounding decides
TOLERANCE = 5e-5  # nats in float32, of a steep model at a temperature below 1
FAMILIES = {
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {},
    "glm4_moe": {
        "n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1,
    },
}  # fmt: skip
DENSE_LAYERS = {"glm4_moe": 1}


def save_model(family, folder, **changes):
    config = CONFIG_MAPPING[family](**SIZES | FAMILIES.get(family, {}) | changes)
    family_engines.save_model(config, folder, steep=1.5)


@torch.no_grad()
def scored(policy, turns, *, replays=True):
    packed = collate_pairs(
        [(LONG_PROMPT, turn.token_ids) for turn in turns],
        share_prompts=True,
        experts=[turn.experts if replays else None for turn in turns],
    )
    found = policy(packed, temperature=TEMPERATURE, chunk_size=64).logprobs.numpy()
    return np.abs(found - np.concatenate([turn.logprobs for turn in turns])).max()


def own_choices(policy, turn):
    """[P+L-1, layers, chosen] of a plain forward."""
    pair = (LONG_PROMPT, turn.token_ids)
    with torch.no_grad():
        policy(collate_pairs([pair]), temperature=1.0, chunk_size=64)
    return {layer: own.numpy() for layer, own in policy.routing.own.items()}


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(name, marks=SLOW) for name in [*FAMILIES][1:])]
)
def test_an_engine_tells_its_choices_before_and_after_an_update(family, tmp_path, monkeypatch):
    for name, value in worker_environment().items():
        monkeypatch.setitem(os.environ, name, value)
    from async_grpo.rollout.engine import Engine

    save_model(family, tmp_path)
    policy = load_policy(str(tmp_path), attention=PACKED, dtype=torch.float32)
    request = make_request()
    request = replace(request, sampling=replace(request.sampling, with_experts=True))
    with asyncio.Runner() as runner:
        engine = Engine(WorkerConfig(model_path=str(tmp_path), max_num_seqs=4))
        try:
            for batches in range(2):
                canary = canary_of(policy.model, (LONG_PROMPT[:64],))
                snapshot = snapshot_of(policy.model.named_parameters(), batches, canary=canary)
                loaded = runner.run(engine.load(snapshot, fetch))
                # vLLM packs experts for a CPU.
                assert not loaded.canary_problem or "otherwise than" in loaded.canary_problem
                for _ in range(2):  # the second time the prompt is cached
                    turns = runner.run(engine.generate(request))
                    differing = [differing_choices(policy, turn, family) for turn in turns]
                    assert max(differing) < NEARLY_EQUAL
                    assert scored(policy, turns) < TOLERANCE
                check_canary(policy, snapshot.canary, loaded)
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.std())
            assert scored(policy, turns) > 0.01  # of other weights
        finally:
            engine._llm.shutdown()


def differing_choices(policy, turn, family):
    """The share of tokens and layers for which the engine has chosen other experts."""
    own = own_choices(policy, turn)
    assert min(own) == DENSE_LAYERS.get(family, 0)
    told = turn.experts.reshape(len(LONG_PROMPT) + len(turn.token_ids) - 1, -1, 2)
    return np.mean(
        [(np.sort(told[:, layer]) != np.sort(chosen)).any(-1) for layer, chosen in own.items()]
    )


def check_canary(policy, rows, loaded):
    """The canary tells the share of differing choices, here of routers that are made to differ."""
    ids = rows[0].token_ids
    with torch.no_grad():
        policy(collate_pairs([(ids[:1], ids[1:])]), temperature=1.0, chunk_size=64)
    own = {layer: chosen.numpy() for layer, chosen in policy.routing.own.items()}
    ack = WeightsAck(
        "w", WeightsVersion(0, 0), 0.0, 0.0, canary=loaded.canary,
        canary_experts=loaded.canary_experts,
    )  # fmt: skip
    assert routing_mismatch([CanaryRow(ids, rows[0].logprobs, experts=own)], ack) < NEARLY_EQUAL
    flipped = {layer: (chosen + 1) % 8 for layer, chosen in own.items()}
    assert routing_mismatch([CanaryRow(ids, rows[0].logprobs, experts=flipped)], ack) > 0.5
