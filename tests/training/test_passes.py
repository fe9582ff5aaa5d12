"""Later passes over a batch train the same minibatches, against the policy of the batch's start."""

import copy
from dataclasses import replace
from functools import partial
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from adapted_models import adapted
from oracle import (
    make_config,
    oracle_gradient,
    oracle_logprobs,
    oracle_twin,
    random_samples,
    relative_difference,
    tiny_model,
)
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.training.fsdp import reshard, shard
from async_grpo.training.learner import Learner, on_host
from async_grpo.training.step import BatchStart, EarlierPolicy
from async_grpo.types import EndOfStep, Minibatch, tally
from async_grpo.util.errors import AuditError
from async_grpo.util.stopping import until_stopped

SLOTS, MEMBERS = 4, 2
OPTIONS = {
    "batch_size": SLOTS, "samples_per_question": MEMBERS, "num_passes": 2, "max_staleness": 1,
    "importance_correction": "truncate", "correction_high": 1.05, "kl_coefficient": 0.1,
    "kl_estimator": "k2", "learning_rate": 3e-2, "allow_high_learning_rate": True,
    "loss_chunksize": 5, "trackers": "",
}  # fmt: skip


def make_learner(config, policy, *, rank=0):
    return Learner(policy, config, SimpleNamespace(rank=rank, device=torch.device("cpu")))


def batch_of(samples, config, *, num_ranks=1, rank=0, batch=0):
    """A rank's items of one batch: each step in rounds of one sample a rank, then a filler."""
    batching, objective, items = config.batching, config.objective, []
    per_step = batching.questions_per_step * MEMBERS
    for step in range(batching.steps_per_pass):
        own = samples[step * per_step : (step + 1) * per_step]
        shares = [own[each::num_ranks] for each in range(num_ranks)]
        items += [Minibatch(n, (sample,)) for n, sample in enumerate(shares[rank])]
        items.append(Minibatch(len(own), ()))
        items.append(
            EndOfStep(
                batch,
                step,
                step + 1 == batching.steps_per_pass,
                num_samples=len(own),
                num_tokens=sum(sample.num_trained_tokens for sample in own),
                sent=tuple(
                    tally(
                        share,
                        incarnation=0,
                        aggregation=objective.aggregation,
                        constant_length=objective.constant_length_samples,
                    )
                    for share in shares
                ),
                fates={"trained": len(own)},
                reasons={"failed: verification": 2},
                sums={"reward_sum": 3.0},
            )
        )
    return items


def samples_of(rng, count, *, max_rows=1):
    found = random_samples(rng, count, model=oracle_twin(tiny_model(tied=True)), max_rows=max_rows)
    return [
        replace(sample, ordinal=number, advantage=float(np.float32(sample.advantage)))
        for number, sample in enumerate(found)
    ]


def starts(model, samples, *, dtype=np.float32):
    """[L] of each sample under the weights of the batch's start; held ones are float32."""
    found = (oracle_logprobs(model, sample, temperature=1.0) for sample in samples)
    return [each.detach().numpy().astype(dtype).astype(np.float64) for each in found]


@pytest.mark.parametrize("num_passes", [2, 3])
@pytest.mark.parametrize("per_step", [4, 2])  # one step a pass, and two
@pytest.mark.parametrize("length", [0, 16])  # weights of 1 and of 1/16, exact in float32
@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_the_gradient_of_every_pass_is_the_oracle_s_against_the_batch_s_start(
    num_passes, per_step, length, correction
):
    config = make_config(
        **OPTIONS | {"num_passes": num_passes, "importance_correction": correction},
        train_minibatch_size=per_step,
        aggregation="constant" if length else "token-mean", constant_length_samples=length,
    )  # fmt: skip
    policy = PolicyModel(tiny_model(tied=True, dtype=torch.float64))
    learner, model = make_learner(config, policy), policy.model
    samples = samples_of(np.random.default_rng(7), SLOTS * MEMBERS, max_rows=2)
    start = copy.deepcopy(oracle_twin(model))
    ends, size = [], per_step * MEMBERS
    for item in learner.in_passes(batch_of(samples, config)):
        if isinstance(item, Minibatch):
            learner.accumulate(item)
            continue
        first = item.step_in_batch * size % len(samples)
        own, is_held = samples[first : first + size], item.step_in_batch >= SLOTS // per_step
        begun = starts(start, own, dtype=np.float32 if is_held else np.float64)
        expected = oracle_gradient(model, own, config, start_logprobs=begun if ends else None)
        denominator = learner.denominator(item)
        got = {name: p.grad / denominator for name, p in model.named_parameters()}
        # The ratio of a held score and an engine's is of float32 numbers.
        tolerance = 1e-7 if is_held and correction == "truncate" else 1e-12
        assert relative_difference(got, expected) < tolerance, item.step_in_batch
        before = copy.deepcopy(model.state_dict())
        assert not learner.update(item).skipped
        assert any(not torch.equal(before[name], p) for name, p in model.state_dict().items())
        ends.append(item)
    assert len(ends) == num_passes * SLOTS // per_step == config.batching.steps_per_batch
    assert [end.is_last_of_batch for end in ends] == [False] * (len(ends) - 1) + [True]


def test_later_ends_count_and_describe_what_is_trained_again_and_nothing_else():
    config = make_config(**OPTIONS, train_minibatch_size=2)
    learner = make_learner(config, PolicyModel(tiny_model(tied=True)))
    samples = samples_of(np.random.default_rng(1), SLOTS * MEMBERS)
    ends = list(trained(learner, batch_of(samples, config)))
    assert [end.fates for end in ends] == 2 * [{"trained": 4}] + 2 * [
        {"trained": 4, "zero_contribution": 0}
    ]
    assert [end.sums for end in ends] == 4 * [{"reward_sum": 3.0}]
    assert [dict(end.reasons) for end in ends] == 2 * [{"failed: verification": 2}] + 2 * [{}]
    assert learner.step.clocks.steps == 4 and learner.step.clocks.samples == 16


def trained(learner, items, **options):
    """The ends of steps that have been taken."""
    for item in learner.in_passes(items, **options):
        if isinstance(item, Minibatch):
            learner.accumulate(item)
        else:
            learner.update(item)
            yield item


def test_a_sample_that_a_later_pass_loses_or_repeats_ends_the_run():
    config = make_config(**OPTIONS)
    for change in (lambda held: held[1:], lambda held: [held[0], *held]):
        learner = make_learner(config, PolicyModel(tiny_model(tied=True)))
        samples = samples_of(np.random.default_rng(2), SLOTS * MEMBERS)
        with pytest.raises(AuditError, match="gradient step 2 rank 0 must train what it was sent"):
            for _ in trained(learner, batch_of(samples, config)):
                ((end, held),) = learner._first_pass._steps
                learner._first_pass._steps = [(end, change(held))]


def test_a_step_that_comes_again_is_held_once():
    """The controller was lost in the second step: what came of it is forgotten, and comes again."""
    config = make_config(**OPTIONS, train_minibatch_size=2)
    samples = samples_of(np.random.default_rng(3), SLOTS * MEMBERS)
    learners = [make_learner(config, PolicyModel(tiny_model(tied=True))) for _ in range(2)]
    items = batch_of(samples, config)
    lost = [*items[:8], None, *items[6:]]

    def until_lost(learner):
        for item in lost:
            if item is None:
                learner.discard()
            else:
                yield item

    assert len(list(trained(learners[0], items))) == 4
    assert len(list(trained(learners[1], until_lost(learners[1])))) == 4
    for got, expected in zip(*(each.policy.parameters() for each in learners), strict=True):
        assert torch.equal(got, expected)


def test_a_stop_ends_a_later_pass_before_the_same_item_on_every_rank():
    config = make_config(**OPTIONS)
    learner = make_learner(config, PolicyModel(tiny_model(tied=True)))
    samples = samples_of(np.random.default_rng(4), SLOTS * MEMBERS)
    votes, stop = iter([0, 0, 1]), Event()  # another rank is asked before the third item
    again = partial(until_stopped, agree=lambda mine: next(votes), stop=stop)
    ends = list(trained(learner, batch_of(samples, config), while_going=again))
    assert stop.is_set()
    assert [end.step_in_batch for end in ends] == [0] and not ends[0].is_last_of_batch


def test_one_pass_is_what_it_was_and_holds_nothing():
    config = make_config(**OPTIONS | {"num_passes": 1, "importance_correction": "none"})
    learner = make_learner(config, PolicyModel(tiny_model(tied=True)))
    items = batch_of(samples_of(np.random.default_rng(5), SLOTS * MEMBERS), config)
    assert list(learner.in_passes(items)) == items
    assert learner._first_pass is None and config.mode == "behaviour"


def test_the_first_policy_of_an_adapter_scores_a_sample_in_the_first_pass_alone():
    config = make_config(**OPTIONS, train_minibatch_size=2, lora_rank=2)
    policy = adapted(tiny_model(tied=True), starts=True, lora_rank=2)
    learner = make_learner(config, policy)
    samples = samples_of(np.random.default_rng(8), SLOTS * MEMBERS)
    samples = [replace(sample, scores={}) for sample in samples]  # the trainer computes them
    scored, kl, loss = [], [], learner.algorithm.loss

    def counting(earlier, packed, **setting):
        scored.append(type(earlier))
        return type(earlier).logprobs(earlier, packed, **setting)

    def told(found, packed):
        kl.append(packed.scores["reference"])
        return loss(found, packed)

    for earlier in (learner.step._batch_start, learner.step._first_policy):
        earlier.logprobs = partial(counting, earlier)
    learner.algorithm.loss = told
    assert len(list(trained(learner, batch_of(samples, config)))) == 4
    assert scored == [BatchStart, EarlierPolicy] * 5  # in the second step: 4 samples and a filler
    assert len(kl) == 20 and all(map(torch.equal, kl[:10], kl[10:]))


def test_what_is_held_is_in_no_memory_that_others_own():
    (sample,) = samples_of(np.random.default_rng(9), 1)
    number = sample.num_trained_tokens
    held = on_host(Minibatch(3, (sample,)), {"old": torch.arange(1.0, number + 1)})
    (own,) = held.samples
    assert not np.shares_memory(own.scores["reference"], sample.scores["reference"])
    (row,) = own.episode.rows
    assert own.scores["old"][row.loss_mask].tolist() == [*range(1, number + 1)]
    assert not own.scores["old"][~row.loss_mask].any() and held.round_index == 3


def test_a_pass_of_one_step_keeps_no_second_copy_of_the_weights():
    config = make_config(**OPTIONS)
    learner = make_learner(config, PolicyModel(tiny_model(tied=True)))
    list(trained(learner, batch_of(samples_of(np.random.default_rng(6), 8), config)))
    assert learner.step._batch_start.kept == []


def whole(policy):
    reshard(policy)
    return {name: parameter.full_tensor() for name, parameter in hf_named_parameters(policy)}


def two_batches(rank):
    """Before each step of two batches: the parameters, and the gradient divided by D."""
    config = make_config(**OPTIONS, train_minibatch_size=2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = shard(PolicyModel(tiny_model(tied=True)), mesh)
    learner, found = make_learner(config, policy, rank=rank), []
    for batch in range(2):
        samples = samples_of(np.random.default_rng(batch), SLOTS * MEMBERS)
        items = batch_of(samples, config, num_ranks=dist.get_world_size(), rank=rank, batch=batch)
        for item in learner.in_passes(items):
            if isinstance(item, Minibatch):
                learner.accumulate(item)
                continue
            before = {name: value.clone() for name, value in whole(policy).items()}
            grads = {n: p.grad.full_tensor() / item.num_samples
                     for n, p in hf_named_parameters(policy)}  # fmt: skip
            assert not learner.update(item).skipped
            found.append((before, grads))
    return found


@pytest.mark.integration
def test_two_ranks_come_to_the_oracle_s_gradient_in_every_pass(tmp_path):
    config = make_config(**OPTIONS, train_minibatch_size=2)
    steps, _ = run_ranks(two_batches, num_ranks=2, folder=tmp_path)
    assert len(steps) == 8
    for number, (before, got) in enumerate(steps):
        batch, step = divmod(number, 4)
        samples = samples_of(np.random.default_rng(batch), SLOTS * MEMBERS)
        own = samples[step % 2 * 4 :][:4]
        model, start = tiny_model(tied=True), tiny_model(tied=True)
        model.load_state_dict(before, strict=False)
        start.load_state_dict(steps[4 * batch][0], strict=False)
        begun = starts(oracle_twin(start), own) if step else None
        expected = oracle_gradient(model, own, config, start_logprobs=begun)
        assert relative_difference(got, expected) < 1e-5, number
