"""Whole runs of the batcher in a loop whose clock jumps: any latencies, failures and options."""

import logging
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from effort import histories
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from script import Script, reference_length
from scripted import run
from scripted_run import INCARNATION, QUESTIONS, Cluster, Run, make_config, split_steps

from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.ledger import FATES
from async_grpo.model.collate import collate
from async_grpo.types import Minibatch, WeightsVersion, tally

few = st.frozensets(st.integers(0, 30), max_size=6)
SHAPES = ((2, 0), (2, 1), (4, 0), (4, 2), (4, 1), (6, 3))  # questions a batch, a gradient step
OBJECTIVES = (
    {},
    {"aggregation": "token-mean"},
    {"entropy_coefficient": 0.125},
    {"kl_coefficient": 0.125},
    {"kl_coefficient": 0.125, "kl_estimator": "k1"},
)


LENGTH_LIMITS = (
    {},
    {"mask_truncated_samples": True},
    {"length_limit_policy": "zero_reward"},
    {"length_limit_policy": "invalidate"},
)


REFERENCES = (
    {},
    {"use_ref_answers": True},
    {"use_ref_answers": True, "ref_answer_coefficient": 0.5},
)


@st.composite
def scripts(draw, references=REFERENCES):
    batch_size, step_size = draw(st.sampled_from(SHAPES))
    # A batch of which nothing can be graded would end the run: one slot of each is spared.
    some = few.map(lambda ordinals: frozenset(n for n in ordinals if n % batch_size))
    buffer = draw(st.sampled_from([0, 4, 8]))
    config = make_config(
        batch_size=batch_size,
        train_minibatch_size=step_size,
        num_training_batches=draw(st.integers(1, 4)),
        samples_per_question=draw(st.integers(2, 4)),
        max_staleness=draw(st.integers(0, 3)),
        max_tokens_per_gpu=draw(st.sampled_from([20, 40, 500])),
        advantage=draw(st.sampled_from(["grpo", "dr", "rloo"])),
        dynamic_sampling=draw(st.sampled_from([0, 1, 3])),
        **draw(st.sampled_from(LENGTH_LIMITS)),
        overlong_buffer_tokens=buffer,
        overlong_penalty=0.5,
        **draw(st.sampled_from(OBJECTIVES)),
        **draw(st.sampled_from(references)),
    )
    script = Script(
        config=config,
        num_ranks=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
        timing=draw(st.integers(0, 1000)),
        failing=draw(some),
        failing_later=draw(some),
        dropped=draw(some),
        flaky=draw(few),
        even=draw(few),
        barren=draw(few),
        slowest_s=draw(st.sampled_from([0.0, 1.0, 30.0])),
        loses_a_lease=draw(st.booleans()),
        max_rows=1 if config.objective.use_ref_answers else draw(st.sampled_from([1, 1, 3])),
        shares_prefixes=draw(st.booleans()),  # all outputs of a script begin alike
    )
    spared = range(0, batch_size * config.batching.num_training_batches, batch_size)
    assume(all(script.attempts(ordinal)[1] is not None for ordinal in spared))
    return script


def many(examples):
    slow = [HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, suppress_health_check=slow)


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Thousands of failures are told in the log, and pytest would keep them all."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Watched(Run):
    """A run whose books are read at every item that a rank gets."""

    def __init__(self, script):
        super().__init__(script)
        self.received = [[] for _ in range(script.num_ranks)]
        take, ledger = self.batcher.next_items, self.batcher._ledger

        async def next_items(rank, index):
            items = await take(rank, index)
            ledger.check()
            self.received[rank] += items
            return items

        self.batcher.next_items = next_items


def watched(script):
    """(steps of every rank, the batcher's status at the end, the run)."""
    running = Watched(script)

    async def scenario():
        return await running.train(), running.served.status()

    items, status = run(scenario())
    return list(map(split_steps, items)), status, running


def samples_of(ranks, number):
    """The samples that all ranks were sent in one step."""
    return [s for own in ranks for minibatch in own[number][0] for s in minibatch.samples]


@pytest.mark.timeout(1800)
@many(histories(60))
@given(scripts())
def test_every_sample_has_one_fate_and_is_counted_once_in_any_history(script):
    ranks, status, running = watched(script)
    config, expected = script.config, [script.step(key) for key in script.steps]
    assert [len(own) for own in ranks] == [len(expected)] * script.num_ranks
    for number, step in enumerate(expected):
        ends = [own[number][1] for own in ranks]
        assert all(end == ends[0] for end in ends)
        assert len({tuple(m.round_index for m in own[number][0]) for own in ranks}) == 1
        check_end(step, ends[0])
        check_sent(config, [own[number] for own in ranks], ends[0])
        assert sum(own.num_samples for own in ends[0].sent) == ends[0].fates["trained"]
        check_samples(step, samples_of(ranks, number))
    check_books(running, status, expected)
    assert running.cluster.scored_tokens == sum(step.scored_tokens for step in expected)
    for ordinal, num_published in running.cluster.started.items():
        assert (
            num_published >= ordinal // config.batching.batch_size - config.sampling.max_staleness
        )
    for own in running.received:
        for minibatch in (item for item in own if isinstance(item, Minibatch)):
            num_tokens = sum(sample.num_tokens for sample in minibatch.samples)
            if script.shares_prefixes:
                options = {"aggregation": "token-mean", "share_prompts": True}
                num_tokens = collate(minibatch.samples, **options).input_ids.numel()
            assert num_tokens <= config.batching.max_tokens_per_gpu


def check_sent(config, steps, end):
    """What the audit of the trainer will compare is what each rank was really given."""
    weighing = {
        "aggregation": config.objective.aggregation,
        "constant_length": config.objective.constant_length_samples,
    }
    given = [
        [s for minibatch in minibatches for s in minibatch.samples] for minibatches, _ in steps
    ]
    counted = [tally(samples, incarnation=INCARNATION, **weighing) for samples in given]
    assert [own[:3] for own in end.sent] == [own[:3] for own in counted]
    assert [own.weight for own in end.sent] == pytest.approx([own.weight for own in counted])


def check_end(step, end):
    script, config = step.script, step.script.config
    assert (end.batch, end.step_in_batch) == step.key
    assert end.is_last_of_batch == (step.key.step_in_batch + 1 == config.batching.steps_per_batch)
    assert dict(end.fates) == step.fates | {
        "discarded": step.fates["discarded"] + num_revoked(end.reasons)
    }
    with_reason = step.fates["failed"] + end.fates["discarded"]
    assert sum(end.reasons.values()) == with_reason
    assert (end.num_samples, end.num_tokens) == step.denominators
    sums = end.sums
    num_sampled = end.num_samples - step.num_references
    assert sums.get("num_samples", 0) == num_sampled
    assert sums.get("given_samples", 0) == step.num_references
    of_references = step.sum_over_kept(lambda o, a: sum(script.reference(o, a).values()))
    assert sums.get("ref_reward_sum", 0) == of_references
    assert sums.get("lag_max", 0) <= config.sampling.max_staleness
    num_tokens = step.sum_over_kept(script.member_tokens)
    assert sums.get("output_tokens", 0) == num_tokens
    assert (lag_bins(sums, "samples"), lag_bins(sums, "tokens")) == (num_sampled, num_tokens)
    rewards = step.sum_over_kept(lambda o, a: sum(script.graded(o, a).values()))
    assert sums.get("reward_sum", 0.0) == rewards
    shaped = step.sum_over_kept(lambda o, a: sum(script.shaped_rewards(o, a).values()))
    penalties = sums.get("overlong_penalty_sum", 0.0) + sums.get("kl_penalty_sum", 0.0)
    assert rewards - penalties == shaped
    assert sums.get("num_replacements", 0) == step.sum_over_replaced(lambda o, a: 1)
    size = config.sampling.samples_per_question
    assert sums.get("replaced_samples", 0) == step.sum_over_replaced(lambda o, a: size)
    assert sums.get("failed_samples", 0) == step.fates["failed"]
    assert sums.get("replaced_tokens", 0) == step.sum_over_replaced(
        lambda o, a: sum(script.lengths(o, a))
    )


def num_revoked(reasons):
    """Samples of the one lease that a run may lose; whose it is is a matter of time."""
    return reasons.get("discarded: lease revoked", 0)


def lag_bins(sums, what):
    return sum(value for key, value in sums.items() if key.startswith("lag_") and what in key)


def check_samples(step, samples):
    script, config = step.script, step.script.config
    sent = {(sample.ordinal, sample.index, sample.row): sample for sample in samples}
    assert len(sent) == len(samples)
    whole = {(s.ordinal, s.index): s.num_trained_tokens for s in samples}
    assert whole == step.trained  # L_i in each of its rows
    for (ordinal, index, number), sample in sent.items():
        attempt = step.slots[ordinal][1]
        if index == config.sampling.samples_per_question:
            check_reference(script, sample, attempt)
            continue
        lengths = script.row_lengths(ordinal, attempt, index)
        assert all((ordinal, index, other) in sent for other in range(len(lengths)))
        (row,) = sample.episode.rows
        assert len(row.token_ids) == lengths[number]
        asked = QUESTIONS[script.question(ordinal, attempt)].input_token_ids
        assert sample.question.input_token_ids is asked
        assert sample.question.reference_token_ids is None  # ranks have it as a sample, or not
        assert sample.verdict.reward == script.graded(ordinal, attempt)[index]
        assert sample.shaped_reward == script.shaped_rewards(ordinal, attempt)[index]
        assert ("reference" in sample.scores) == find_algorithm(config).needs_reference
        for version, start, stop in sample.episode.rows[0].weights_versions:
            assert stop > start
            assert 0 <= step.key.batch - version.batches <= config.sampling.max_staleness


def check_reference(script, sample, attempt):
    (row,) = sample.episode.rows
    number = script.question(sample.ordinal, attempt)
    assert (row.token_ids == np.arange(reference_length(number))).all() and row.loss_mask.all()
    assert row.prompt_token_ids is QUESTIONS[number].input_token_ids
    assert sample.episode.is_given and not row.weights_versions and not sample.scores
    reward = script.reference(sample.ordinal, attempt)[sample.index]
    assert (sample.verdict.reward, sample.shaped_reward) == (reward, reward)


def check_books(running, status, expected):
    ledger = running.batcher._ledger
    totals = {fate: sum(step.fates[fate] for step in expected) for fate in FATES}
    lost = num_revoked(ledger.fates.reasons)
    assert lost in (0, running.script.size * running.script.loses_a_lease)
    totals["discarded"] += lost
    assert {fate: ledger.fates.samples[fate] for fate in FATES} == totals
    assert ledger.admitted_samples == sum(totals.values()) == status.done
    assert (ledger.in_flight, len(ledger.open_slots)) == (0, 0)
    assert ledger.output_tokens == running.cluster.sampled_tokens == ledger.fates.tokens.total()
    assert ledger.fates.tokens - Counter(discarded=ledger.fates.tokens["discarded"]) == sum(
        (step.token_fates for step in expected), Counter()
    )
    left_out = ledger.fates.reasons["discarded: length limit"]
    assert left_out == sum(step.num_left_out for step in expected)
    longest = running.config.sampling.max_generation_tokens
    assert ledger.fates.token_reasons["discarded: length limit"] == left_out * longest
    assert bool(ledger.fates.tokens["discarded"]) == bool(lost + left_out)
    assert ledger.admitted_slots == sum(len(step.ordinals) for step in expected)
    idle = (status.generating, status.verifying, status.in_reference, status.ready, status.training)
    assert idle == (0, 0, 0, 0, 0)
    assert not running.generation.open


@pytest.mark.timeout(1800)
@many(histories(50) // 2)  # pairs
@given(scripts(), st.integers(1001, 2000), st.sampled_from([0.0, 3.0, 30.0]))
def test_the_order_of_completion_never_selects_what_is_trained(script, timing, slowest_s):
    once, _, _ = watched(script)
    again, _, _ = watched(replace(script, timing=timing, slowest_s=slowest_s))
    for number in range(len(script.steps)):
        first, second = (sorted(map(identity, samples_of(r, number))) for r in (once, again))
        assert first == second
        assert without_lag(once[0][number][1]) == without_lag(again[0][number][1])


def identity(sample):
    """All that the gradient of a sample depends on, but for who made its tokens when."""
    return (
        (sample.ordinal, sample.index, sample.row, sample.advantage, sample.shaped_reward),
        sample.episode.rows[0].loss_mask.tolist(),
        sample.episode.rows[0].token_ids.tolist(),
        len(sample.question.input_token_ids),
    )


def without_lag(end):
    """The end of a step, to the last bit of its sums.

    Only the age of the weights may differ, and whose work was lost and done again.
    """
    sums = {k: v for k, v in end.sums.items() if "lag" not in k}
    tokens = {k: v for k, v in end.tokens.items() if not k.startswith("discarded")}
    fates = {**end.fates, "discarded": 0}
    return replace(end, sums=sums, fates=fates, reasons={}, tokens=tokens)


def ends(ranks):
    return [end for _, end in ranks[0]]


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_lag_reaches_its_bound_and_is_counted_a_sample_and_a_token(max_staleness):
    config = make_config(max_staleness=max_staleness, num_training_batches=8)
    ranks, _, _ = watched(Script(config=config))
    sums = [end.sums for end in ends(ranks)]
    assert [s["lag_max"] for s in sums][:2] == [0, 1]
    assert max(s["lag_max"] for s in sums) == max_staleness
    for step_sums in sums:
        assert step_sums["lag_sum"] == sum(
            lag * step_sums[f"lag_{lag}_samples"] for lag in range(max_staleness + 1)
        )
        assert f"lag_{max_staleness + 1}_samples" not in step_sums
    younger = sum(s["token_lag_sum"] / s["output_tokens"] for s in sums)
    assert younger < sum(s["lag_sum"] / s["num_samples"] for s in sums)


def test_a_sample_of_several_rows_counts_once_on_the_rank_that_has_its_first():
    config = make_config(max_tokens_per_gpu=20, entropy_coefficient=0.125)
    ranks, _, _ = watched(Script(config=config, num_ranks=3, max_rows=3))
    size, num_apart = config.batching.batch_size * config.sampling.samples_per_question, 0
    for number, end in enumerate(ends(ranks)):
        firsts, places = [], {}
        for rank, own in enumerate(ranks):
            parts = samples_of([own], number)
            firsts.append(sum(part.row == 0 for part in parts))
            for part in parts:
                places.setdefault((part.ordinal, part.index), set()).add(rank)
        assert [own.num_samples for own in end.sent] == firsts
        assert sum(firsts) == end.num_samples == end.fates["trained"] == size
        num_apart += sum(len(own) > 1 for own in places.values())
    assert num_apart > 0


def test_weights_that_are_too_old_end_the_run_with_the_bug_s_name():
    running = Run(Script(config=make_config(max_staleness=1, num_training_batches=4)))
    running.batcher._window.oldest_weights = lambda ordinal: WeightsVersion(INCARNATION, 0)
    running.cluster.__class__ = Frozen
    with pytest.raises(RuntimeError, match=r"lag must be in 0\.\.1 .* got 2: tokens of version 0"):
        run(running.train())


class Frozen(Cluster):
    """Workers that never load new weights."""

    def _completion(self, first, num_tokens):
        self.version = WeightsVersion(INCARNATION, 0)
        return super()._completion(self.version, num_tokens)


def test_a_try_that_fails_before_a_token_uses_up_no_replay_of_the_group():
    config = make_config(batch_size=2, samples_per_question=2, num_training_batches=1)
    every = {"flaky": frozenset({0, 1}), "loses_a_lease": True, "max_rows": 3}
    ranks, _, running = watched(Script(config=config, seed=0, slowest_s=0.0, **every))
    (end,) = ends(ranks)
    assert end.fates["failed"] == 0
    assert sorted(running.cluster.tries.values()) == [2, 3]  # one group lost a lease as well


def test_without_variance_a_slot_draws_up_to_its_bound_and_keeps_the_last():
    config = make_config(dynamic_sampling=2, num_training_batches=1, batch_size=2)
    script = Script(config=config, barren=frozenset({0}), seed=1)
    ranks, _, running = watched(script)
    (end,) = ends(ranks)
    assert running.cluster.attempts[0] == 2
    assert running.cluster.tries == {(0, 0): 1, (0, 1): 1, (0, 2): 1, (1, 0): 1}
    assert (end.fates["replaced"], end.fates["zero_contribution"] >= 3) == (6, True)
    assert (end.num_samples, end.sums["num_replacements"]) == (6, 2)
    assert end.sums["replaced_reward_sum"] == 6 * 0.5
    received = sum(n for a in range(3) for n in script.lengths(0, a))
    received += sum(script.lengths(1))
    assert running.batcher._ledger.output_tokens == received
