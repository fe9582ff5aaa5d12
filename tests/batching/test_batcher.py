"""The batcher between scripted services and trainer ranks, in every order things can finish."""

import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import make_completion, run
from scripted_run import INCARNATION, Run, Script, make_config

from async_grpo.batching.batcher import MAX_SEQUENTIAL_FAILURES
from async_grpo.errors import WorkerError
from async_grpo.types import EndOfStep, Minibatch, WeightsVersion


def split_steps(items):
    """[(minibatches, end)] of one rank's items."""
    steps, minibatches = [], []
    for item in items:
        if isinstance(item, Minibatch):
            minibatches.append(item)
        else:
            steps.append((minibatches, item))
            minibatches = []
    assert not minibatches
    return steps


def keys(minibatches):
    return [(sample.ordinal, sample.index) for m in minibatches for sample in m.samples]


def ends(items):
    return [item for item in items if isinstance(item, EndOfStep)]


async def train(script):
    """(items of every rank, the batcher's status at the end, the run)."""
    running = Run(script)
    items = await running.train()
    return items, await running.batcher.status(), running


ordinals = st.frozensets(st.integers(0, 30), max_size=8)


@st.composite
def scripts(draw):
    questions = draw(st.sampled_from([(2, 0), (2, 1), (4, 0), (4, 2), (4, 1), (6, 3)]))
    config = make_config(
        batch_size=questions[0],
        train_minibatch_size=questions[1],
        num_training_batches=draw(st.integers(1, 4)),
        samples_per_question=draw(st.integers(2, 4)),
        max_staleness=draw(st.integers(0, 2)),
        kl_coefficient=draw(st.sampled_from([0.0, 0.1])),
        max_tokens_per_gpu=draw(st.sampled_from([20, 40, 500])),
        aggregation=draw(st.sampled_from(["sample-mean", "token-mean"])),
    )
    return Script(
        config=config,
        num_ranks=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
        failing=draw(ordinals),
        dropped=draw(ordinals),
        flaky=draw(ordinals),
        even=draw(ordinals),
        slowest_s=draw(st.sampled_from([0.0, 1.0, 30.0])),
        loses_a_lease=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(scripts())
def test_every_sample_is_trained_or_counted_exactly_once_in_any_order(script):
    items, status, running = run(train(script))
    kinds = [[(type(item), getattr(item, "round_index", None)) for item in i] for i in items]
    assert all(kind == kinds[0] for kind in kinds)
    steps = [split_steps(own) for own in items]
    for number, step in enumerate(script.steps):
        end = steps[0][number][1]
        assert all(own[number][1] == end for own in steps)
        check_step(script, step, end, [own[number][0] for own in steps])
    assert [len(own) for own in steps] == [len(script.steps)] * script.num_ranks
    assert status.done == script.config.samples_per_question * script.config.batch_size * (
        script.config.num_training_batches
    )
    idle = (status.generating, status.verifying, status.in_reference, status.ready, status.training)
    assert idle == (0, 0, 0, 0, 0)
    assert not running.generation.open


def check_step(script, step, end, minibatches_of_ranks):
    fates = script.fates(step)
    sent = [key for minibatches in minibatches_of_ranks for key in keys(minibatches)]
    assert sorted(sent) == sorted(key for key, fate in fates.items() if fate == "trained")
    counts = Counter(fates.values())
    assert Counter(end.fates) == counts | Counter()
    assert sum(end.fates.values()) == len(fates)
    in_d = [key for key, fate in fates.items() if fate != "failed"]
    assert (end.num_samples, end.num_tokens) == (len(in_d), sum(map(script.tokens, in_d)))
    assert (end.batch, end.step_in_batch) == step
    assert end.is_last_of_batch == (step.step_in_batch + 1 == script.config.steps_per_batch)
    assert end.sums.get("num_samples", 0) == len(in_d)
    assert end.sums.get("lag_max", 0) <= script.config.max_staleness
    rewards = sum(script.rewards(ordinal)[index] for ordinal, index in in_d)
    assert end.sums.get("reward_sum", 0.0) == pytest.approx(rewards)
    for minibatches in minibatches_of_ranks:
        for minibatch in minibatches:
            num_tokens = sum(sample.num_tokens for sample in minibatch.samples)
            assert num_tokens <= script.config.max_tokens_per_gpu


@settings(max_examples=40, deadline=None)
@given(scripts())
def test_no_question_starts_before_its_window_opens(script):
    _, _, running = run(train(script))
    config = script.config
    for ordinal, num_published in running.cluster.started.items():
        batch = ordinal // config.batch_size
        assert num_published >= batch - config.max_staleness
        if config.max_staleness == 0:
            assert num_published == batch
    oldest = {version for _, version in running.generation.asked}
    assert oldest <= {
        WeightsVersion(INCARNATION, max(0, batch - config.max_staleness))
        for batch in range(config.num_training_batches)
    }


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_the_window_is_used_up_to_its_edge(max_staleness):
    config = make_config(max_staleness=max_staleness, num_training_batches=5)
    running = Run(Script(config=config))

    async def scenario():
        await running.publish(0)
        await asyncio.sleep(100)  # nobody trains

    run(scenario())
    assert sorted(running.cluster.started) == list(range(4 * (1 + max_staleness)))


def test_a_run_that_is_ahead_measures_its_lag():
    config = make_config(max_staleness=1, num_training_batches=4)
    items, _, _ = run(train(Script(config=config)))
    lags = [end.sums["lag_max"] for end in ends(items[0])]
    assert lags[0] == 0
    assert max(lags) == 1


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
def test_a_group_without_variance_is_sent_only_when_it_has_a_gradient(kl_coefficient):
    config = make_config(kl_coefficient=kl_coefficient, num_training_batches=1)
    items, _, _ = run(train(Script(config=config, even=frozenset({0, 1, 2, 3}), seed=3)))
    (end,) = ends(items[0])
    sent = [
        key for own in items for minibatches, _ in split_steps(own) for key in keys(minibatches)
    ]
    assert end.num_samples == 12
    assert bool(sent) == bool(kl_coefficient)
    samples = [
        s for own in items for item in own if isinstance(item, Minibatch) for s in item.samples
    ]
    assert all(sample.advantage == 0.0 for sample in samples)
    assert all(sample.reference_logprobs is not None for sample in samples)


@pytest.mark.parametrize(("period", "expected"), [(1_000_000, [0, 0, 0, 0]), (2, [0, 0, 2, 2])])
def test_the_reference_follows_the_policy_every_so_many_batches(period, expected):
    config = make_config(
        kl_coefficient=0.1, num_training_batches=4, num_batches_per_ref_model_update=period
    )
    _, _, running = run(train(Script(config=config)))
    assert running.cluster.references == [version for version in expected for _ in range(4)]


def test_a_step_in_which_every_group_failed_has_a_denominator_of_0():
    config = make_config(train_minibatch_size=2)
    script = Script(config=config, failing=frozenset({4}), dropped=frozenset({5}))
    items, _, _ = run(train(script))
    end = ends(items[0])[2]
    assert (end.batch, end.step_in_batch) == (1, 0)
    assert (end.num_samples, end.num_tokens, dict(end.sums)) == (0, 0, {})
    assert end.fates == {
        "trained": 0, "zero_contribution": 0, "failed": 6, "discarded": 0, "replaced": 0
    }  # fmt: skip
    assert len(ends(items[0])) == 6


def test_the_ledger_names_the_stage_that_lost_a_group():
    script = Script(config=make_config(), failing=frozenset({1}), dropped=frozenset({2, 3}))
    _, _, running = run(train(script))
    assert running.batcher._ledger.counts().reasons == {
        "failed: verification": 3,
        "failed: generation": 6,
    }


def test_a_run_in_which_nothing_works_is_ended():
    everything = frozenset(range(1000))
    script = Script(config=make_config(num_training_batches=100), failing=everything, slowest_s=0.1)
    running = Run(script)
    with pytest.raises(WorkerError, match=r"32 questions in a row failed, the last: .*killed"):
        run(running.train())
    assert len(running.cluster.started) == MAX_SEQUENTIAL_FAILURES


def test_failures_between_successes_do_not_end_a_run():
    config = make_config(batch_size=MAX_SEQUENTIAL_FAILURES, num_training_batches=4)
    num_questions = 4 * MAX_SEQUENTIAL_FAILURES
    lucky = set(range(0, num_questions, MAX_SEQUENTIAL_FAILURES // 2))
    failing = frozenset(set(range(num_questions)) - lucky)
    items, _, _ = run(train(Script(config=config, failing=failing, slowest_s=0.0)))
    assert sum(end.num_samples for end in ends(items[0])) == len(lucky) * 3


def test_an_error_inside_a_slot_is_what_every_rank_hears():
    running = Run(Script(config=make_config()))

    async def without_version(request):
        return (make_completion(None),) * request.num_samples

    running.cluster.generate = without_version

    async def scenario():
        await running.publish(0)
        ranks = (running.batcher.next_item(rank, 0) for rank in range(2))
        return await asyncio.gather(*ranks, return_exceptions=True)

    assert [type(outcome) for outcome in run(scenario())] == [TypeError, TypeError]


def test_an_aborted_run_tells_every_rank_why():
    running = Run(Script(config=make_config()))

    async def scenario():
        ranks = [asyncio.ensure_future(running.batcher.next_item(rank, 0)) for rank in range(2)]
        await asyncio.sleep(1)
        await running.batcher.abort("no generation worker could load new weights")
        return await asyncio.gather(*ranks, return_exceptions=True)

    assert [str(error) for error in run(scenario())] == [
        "no generation worker could load new weights"
    ] * 2


def test_deterministic_rounds_do_not_depend_on_who_finished_first():
    config = make_config(deterministic=True, train_minibatch_size=2, samples_per_question=4)
    sent = []
    for slowest_s in (0.0, 7.0):
        items, _, _ = run(train(Script(config=config, slowest_s=slowest_s)))
        sent.append([[keys([i]) for i in own if isinstance(i, Minibatch)] for own in items])
    assert sent[0] == sent[1]


def test_the_status_follows_samples_through_the_stages():
    config = make_config(kl_coefficient=0.1, num_training_batches=1)
    running = Run(Script(config=config))

    async def scenario():
        seen = [await running.batcher.status()]
        training = asyncio.ensure_future(running.train())
        while not training.done():
            await asyncio.sleep(0.05)
            seen.append(await running.batcher.status())
        return seen

    seen = run(scenario())
    assert max(status.generating for status in seen) == 12
    assert max(status.verifying for status in seen) > 0
    assert max(status.in_reference for status in seen) > 0
    assert max(status.training for status in seen) > 0
    assert [seen[0].done, seen[-1].done] == [0, 12]
    assert seen[-1].workers == {"generation": 2, "logprob": 1}
    lengths = [n for ordinal in range(4) for n, _ in running.script.lengths(ordinal)]
    assert seen[-1].output_tokens == sum(lengths)


def test_dumped_samples_tell_the_same_story(tmp_path):
    config = make_config(output_dir=str(tmp_path), dump_samples_filename="samples.jsonl")
    script = Script(config=config, failing=frozenset({1}), even=frozenset({2}))
    run(train(script))
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    told = {(line["ordinal"], line["index"]): line["fate"] for line in lines}
    expected = {key: fate for step in script.steps for key, fate in script.fates(step).items()}
    assert len(lines) == len(told)
    assert told == {key: fate for key, fate in expected.items() if fate != "failed"}
    assert all(line["batch"] == line["ordinal"] // 4 for line in lines)
