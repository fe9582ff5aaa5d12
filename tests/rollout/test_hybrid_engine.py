"""An engine of a hybrid of gated deltas and attention, in bf16, serves an update's bits."""

import asyncio
import os

import numpy as np
import pytest
import torch
from engine_stack import FIRST, LONG_PROMPT, TEMPERATURE, fetch, make_request
from model_families import family_model
from tiny_models import save_tokenizer, snapshot_of

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate_pairs
from async_grpo.model.loading import load_policy
from async_grpo.rollout.generation_worker import worker_environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]
# vLLM has gated deltas beside experts alone; of as many as are chosen, rounding flips no choice.
HYBRID = {
    "vocab_size": 128, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 512,
    "mlp_only_layers": [0, 1, 2], "num_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip


def test_an_update_of_a_hybrid_in_flight_serves_the_bits_of_an_engine_started_from_it(
    tmp_path, monkeypatch
):
    """In bf16, the only type in which vLLM has gated deltas on CPUs: no layer keeps what it had."""
    for name, value in worker_environment().items():
        monkeypatch.setitem(os.environ, name, value)
    old, new = (rounded_hybrid(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    updated = sampled(old, update=load_policy(new, attention=PACKED, dtype=torch.float32))
    for ours, theirs in zip(updated, sampled(new), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logprobs.tolist() == theirs.logprobs.tolist()
    exact, own = (scores(new, updated, dtype=each) for each in (torch.float32, torch.bfloat16))
    engine = np.concatenate([turn.logprobs for turn in updated])
    assert np.abs(engine - exact).mean() < 1.5 * np.abs(own - exact).mean()  # 0.8 was seen


def rounded_hybrid(folder, *, seed):
    """A folder in float32 of numbers that bf16 has, so that an update loses nothing of them."""
    model = family_model("qwen3_next", attention="eager", dtype=torch.float32, **HYBRID)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1).copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    return save_tokenizer(folder)


def sampled(folder, *, update=None):
    """The same request to a bf16 engine of a folder, after an update with a policy's weights."""
    from async_grpo.rollout.engine import Engine

    with asyncio.Runner() as runner:
        engine = Engine(WorkerConfig(model_path=folder, max_num_seqs=4, dtype="bfloat16"))
        try:
            if update is None:
                runner.run(engine.rename(FIRST))
            else:
                named = [(n, p.detach().bfloat16()) for n, p in update.model.named_parameters()]
                runner.run(engine.load(snapshot_of(named, 0), fetch))
            return runner.run(engine.generate(make_request(seed=7, stop=())))
        finally:
            engine._llm.shutdown()


def scores(folder, turns, *, dtype):
    policy = load_policy(folder, attention=PACKED, dtype=dtype)
    packed = collate_pairs([(LONG_PROMPT, turn.token_ids) for turn in turns], share_prompts=True)
    with torch.no_grad():
        return policy(packed, temperature=TEMPERATURE, chunk_size=64).logprobs.float().numpy()
