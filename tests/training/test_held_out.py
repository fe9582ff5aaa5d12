"""The loss on held-out pairs against one plain forward a pair; `test_fsdp.py` has several ranks."""

import numpy as np
import pytest
import torch
from fsdp_scenarios import make_pairs
from learners import make_learner
from oracle import tiny_model

from async_grpo.training.held_out import HeldOutPairs
from async_grpo.training.ranks import Ranks


def oracle_loss(pairs, model):
    """(sum of -log p over the completions' tokens, their number), a forward a pair."""
    loss_sum = 0.0
    for pair in pairs:
        ids = torch.tensor(np.concatenate([pair.prompt_token_ids, pair.completion_token_ids]))
        with torch.no_grad():
            logits = model(ids[None].long(), use_cache=False).logits[0].double()
        lp = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None].long())[:, 0]
        loss_sum -= lp[len(pair.prompt_token_ids) - 1 :].sum().item()
    return loss_sum, sum(len(pair.completion_token_ids) for pair in pairs)


@pytest.mark.parametrize("max_tokens", [24, 4096])
def test_the_loss_is_a_mean_over_all_tokens_whatever_the_packing(tmp_path, max_tokens, monkeypatch):
    monkeypatch.setattr("async_grpo.training.held_out.PACKED_TOGETHER", 4)
    pairs = make_pairs(9)
    options = {"max_tokens_per_gpu": max_tokens, "max_generation_tokens": 12, "objective": "sft"}
    learner = make_learner(tmp_path, **options)
    alone = Ranks(0, 1, learner.device, mesh=None)
    result = HeldOutPairs(pairs, learner, alone).loss()
    loss_sum, num_tokens = oracle_loss(pairs, tiny_model(tied=True))
    assert (result.num_tokens, result.num_pairs) == (num_tokens, 9)
    assert result.loss_sum == pytest.approx(loss_sum, rel=1e-5)
    assert result.mean == pytest.approx(loss_sum / num_tokens, rel=1e-5)
    assert all(parameter.grad is None for parameter in learner.policy.parameters())
