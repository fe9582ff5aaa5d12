"""The loss on held-out pairs, and the gradient of plain text, against one plain forward a pair.

`test_fsdp.py` has several ranks.
"""

import pytest
import torch
from fsdp_scenarios import CONFIG, equip, make_pairs
from learners import make_learner
from oracle import oracle_twin, relative_difference, tiny_model

from async_grpo.batching.supervised import supervised_stream
from async_grpo.data.questions import LineReader
from async_grpo.data.table import blocks_of
from async_grpo.model.collate import collate
from async_grpo.model.policy import PolicyModel
from async_grpo.training.learner import HeldOutPairs
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep


def token_losses(model, prompt, completion):
    """[L] -log p of the completion's tokens, differentiable."""
    ids = torch.tensor([*prompt, *completion])
    logits = model(ids[None].long(), use_cache=False).logits[0].double()
    logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None].long())[:, 0]
    return -logprobs[len(prompt) - 1 :]


@torch.no_grad()
def oracle_loss(pairs, model):
    """(sum of -log p over the completions' tokens, their number), a forward a pair."""
    losses = [token_losses(model, p.prompt_token_ids, p.completion_token_ids) for p in pairs]
    return sum(loss.sum().item() for loss in losses), sum(map(len, losses))


@pytest.mark.parametrize(("max_tokens", "chunk_size"), [(24, 8), (4096, 8), (24, 0)])
def test_the_loss_is_a_mean_over_all_tokens_whatever_the_packing(
    tmp_path, max_tokens, chunk_size, monkeypatch
):
    monkeypatch.setattr("async_grpo.training.learner.PACKED_TOGETHER", 4)
    pairs = make_pairs(9)
    options = {"max_tokens_per_gpu": max_tokens, "max_generation_tokens": 12, "algorithm": "sft"}
    learner = make_learner(tmp_path, loss_chunksize=chunk_size, **options)
    alone = Ranks(0, 1, learner.device, mesh=None)
    result = HeldOutPairs(pairs, learner, alone).loss()
    loss_sum, num_tokens = oracle_loss(pairs, tiny_model(tied=True))
    assert (result.num_tokens, result.num_pairs) == (num_tokens, 9)
    assert result.loss_sum == pytest.approx(loss_sum, rel=1e-5)
    assert result.mean == pytest.approx(loss_sum / num_tokens, rel=1e-5)
    assert all(parameter.grad is None for parameter in learner.policy.parameters())


def gradient_of(pairs, **options):
    """The gradient of one step on these pairs, packed into rows."""
    config = CONFIG.but(
        algorithm="sft", batch_size=len(pairs), train_minibatch_size=0, num_training_batches=1,
        **options,
    )  # fmt: skip
    step, _, gradients = equip(PolicyModel(tiny_model(tied=True)), config)
    stream = supervised_stream(
        pairs, batching=config.batching, stream_index=int, num_ranks=1, rank=0
    )
    for item in stream:
        if isinstance(item, EndOfStep):
            step.finish(item.num_tokens, num_samples=item.num_samples)
        else:
            step.accumulate(collate(item.samples, aggregation="token-mean"))
    return gradients[0]


def oracle_gradient_of(split):
    """(trained tokens, float64 gradient of their mean loss) of (prompt, completion) pairs."""
    twin = oracle_twin(tiny_model(tied=True))
    losses = torch.cat([token_losses(twin, *pair) for pair in split])
    losses.mean().backward()
    return len(losses), {name: parameter.grad for name, parameter in twin.named_parameters()}


def test_the_gradient_of_plain_text_is_of_all_tokens_after_its_first():
    texts = [[5, 9, 3, 7, 1], [8, 1], [2, 2, 6, 1]]
    lines = [{"completion_token_ids": ids} for ids in texts]
    lines.append({"input_token_ids": [4, 3], "completion_token_ids": [9, 1]})
    reader = LineReader(tokenizer=None, vocab_size=64, max_tokens=8)
    found = gradient_of([reader.pair(line) for line in lines], max_tokens_per_gpu=8)
    split = [(ids[:1], ids[1:]) for ids in texts] + [([4, 3], [9, 1])]
    num_tokens, expected = oracle_gradient_of(split)
    assert num_tokens == 4 + 1 + 3 + 2
    assert relative_difference(found, expected) < 1e-5


def test_the_gradient_of_blocks_is_of_all_tokens_after_the_first_of_each():
    texts = [[5, 9, 3, 7, 1], [8, 1], [2, 2, 6, 1, 4, 1, 1]]
    reader = LineReader(tokenizer=None, vocab_size=64, max_tokens=8)
    documents = (reader.document({"completion_token_ids": ids}) for ids in texts)
    found = gradient_of(list(blocks_of(documents, size=4)), max_tokens_per_gpu=9)
    blocks = [5, 9, 3, 7], [1, 8, 1, 2], [2, 6, 1, 4], [1, 1]
    num_tokens, expected = oracle_gradient_of([(ids[:1], ids[1:]) for ids in blocks])
    assert num_tokens == 3 * 3 + 1
    assert relative_difference(found, expected) < 1e-5
