"""The batcher between scripted services and trainer ranks, in every order things can finish."""

import asyncio
import json
import pickle
from collections import Counter
from dataclasses import replace

import pytest
from script import Script
from scripted import make_completion, make_question, run
from scripted_run import ATTENTION_RATIO, Run, make_config, split_steps

from async_grpo.batching.failures import MAX_SEQUENTIAL_FAILURES
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.training.learner import FirstPass
from async_grpo.types import EndOfStep, Minibatch, WeightsVersion
from async_grpo.util.errors import AsyncGrpoError, ConfigError, WorkerError


def keys(minibatches):
    return [(sample.ordinal, sample.index) for m in minibatches for sample in m.samples]


def ends(items):
    return [item for item in items if isinstance(item, EndOfStep)]


async def train(script):
    """(items of every rank, the batcher's status at the end, the run)."""
    running = Run(script)
    items = await running.train()
    return items, running.served.status(), running


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_the_window_is_used_up_to_its_edge(max_staleness):
    config = make_config(max_staleness=max_staleness, num_training_batches=5)
    running = Run(Script(config=config))

    async def scenario():
        await running.publish(0)
        await asyncio.sleep(100)  # nobody trains

    run(scenario())
    assert sorted(running.cluster.started) == list(range(4 * (1 + max_staleness)))


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
    assert all("reference" in sample.scores for sample in samples)


@pytest.mark.parametrize(("period", "expected"), [(1_000_000, [0, 0, 0, 0]), (2, [0, 0, 2, 2])])
def test_the_reference_follows_the_policy_every_so_many_batches(period, expected):
    config = make_config(
        kl_coefficient=0.1,
        num_training_batches=4,
        num_batches_per_ref_model_update=period,
        max_staleness=0,
    )
    _, _, running = run(train(Script(config=config)))
    assert running.cluster.references == [version for version in expected for _ in range(4)]


def test_a_step_in_which_every_group_failed_has_a_denominator_of_0():
    config = make_config(train_minibatch_size=2)
    script = Script(config=config, failing=frozenset({4}), dropped=frozenset({5}))
    items, _, _ = run(train(script))
    end = ends(items[0])[2]
    assert (end.batch, end.step_in_batch) == (1, 0)
    assert (end.num_samples, end.num_tokens) == (0, 0)
    assert dict(end.sums) == {"failed_samples": 6, "finished_samples": 6}
    assert end.fates == {
        "trained": 0, "zero_contribution": 0, "failed": 6, "discarded": 6, "replaced": 0
    }  # fmt: skip
    assert end.reasons == {
        "failed: verification": 3, "failed: generation": 3, "discarded: worker error": 6
    }  # fmt: skip
    assert len(ends(items[0])) == 6


def test_the_ledger_names_the_stage_that_lost_a_group():
    script = Script(config=make_config(), failing=frozenset({1}), dropped=frozenset({2, 3}))
    _, _, running = run(train(script))
    assert running.batcher._ledger.fates.reasons == {
        "failed: verification": 3,
        "failed: generation": 6,
        "discarded: worker error": 2 * 2 * 3,  # two tries before the last one, of three samples
    }


def test_a_question_that_kills_workers_is_asked_no_more(caplog):
    """Question 2 is drawn by ordinals 2, 9, 16, 23: three deaths, then none."""
    script = Script(config=make_config(num_training_batches=7), deadly=frozenset({2}))
    items, _, running = run(train(script))
    assert running.cluster.tries[2, 0] == 3
    assert all(running.cluster.tries[ordinal, 0] == 0 for ordinal in (9, 16, 23))
    reasons = running.batcher._ledger.fates.reasons
    assert (reasons["failed: quarantine"], reasons["discarded: worker died"] >= 6) == (12, True)
    assert items[0][-1].resume.quarantined == (2,)
    told = [record.message for record in caplog.records if "not asked any more" in record.message]
    assert len(told) == 1 and told[0].startswith("question 2 ") and "'2+2='" in told[0]
    innocent = [sample.ordinal for own in items for m in own if isinstance(m, Minibatch)
                for sample in m.samples]  # fmt: skip
    zero = sum(end.fates["zero_contribution"] for end in ends(items[0]))
    assert len(innocent) + zero == (28 - 4) * 3


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            EpisodeFailed(
                FailureClass.ENVIRONMENT, "environment mine.py:Mine raised KeyError('x')"
            ),
            r"none of batch 1 could be: environment mine.py:Mine raised KeyError",
        ),
        (
            ConfigError("/mine.py cannot be imported: correct it"),
            "^/mine.py cannot be imported: co",
        ),
    ],
)
def test_an_environment_that_never_works_ends_the_run_with_its_sentence(error, said):
    running = Run(Script(config=make_config(num_training_batches=100), max_rows=3))

    async def fails(request):
        raise error

    running.cluster.play = fails
    with pytest.raises(AsyncGrpoError, match=said):
        run(running.train())
    assert len(running.cluster.started) == 0


def test_a_run_in_which_nothing_works_is_ended():
    everything = frozenset(range(1000))
    config = make_config(num_training_batches=100, max_staleness=0)
    script = Script(config=config, dropped=everything, slowest_s=0.1)
    running = Run(script)
    with pytest.raises(WorkerError, match=r"32 questions in a row failed, the last: .*of order"):
        run(running.train())
    assert len(running.cluster.started) == MAX_SEQUENTIAL_FAILURES


@pytest.mark.parametrize("dropped", [frozenset(), frozenset({4, 6})])
def test_a_batch_in_which_nothing_could_be_graded_ends_the_run_before_it_is_trained(dropped):
    failing = frozenset(range(4, 8)) - dropped
    running = Run(Script(config=make_config(), failing=failing, dropped=dropped))
    with pytest.raises(WorkerError, match=r"none of batch 2 could be: reward scripted: killed; on"):
        run(running.train())
    assert running.num_published < 2


@pytest.mark.parametrize("num_free", [0, 1])
def test_a_batch_that_grammars_have_sampled_ends_the_run_before_it_is_trained(num_free):
    """One group of another batch, or of the same one, has a turn of the policy's own."""
    running = Run(Script(config=make_config(), max_rows=3))
    play = running.cluster.play

    async def constrained(request):
        played = await play(request)
        if request.ordinal not in range(4 + num_free, 8):
            return played
        episodes = (
            replace(
                episode.untrained(),
                turns=tuple(replace(turn, is_constrained=True) for turn in episode.turns),
            )
            for episode in played.episodes
        )
        return replace(played, episodes=tuple(episodes))

    running.cluster.play = constrained
    if num_free:
        run(running.train())
        return
    with pytest.raises(ConfigError, match="every one of batch 2 was sampled under a grammar"):
        run(running.train())
    assert running.num_published < 2


def test_a_batch_of_which_one_question_was_graded_is_trained():
    failing = frozenset({4, 5, 7})
    items, _, _ = run(train(Script(config=make_config(), failing=failing)))
    assert [end.fates["failed"] for end in ends(items[0])] == [0, 9, 0]
    assert ends(items[0])[1].sums["failed_samples"] == 9
    assert ends(items[0])[1].sums["finished_samples"] == 12


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
        ranks = (running.batcher.next_items(rank, 0) for rank in range(2))
        return await asyncio.gather(*ranks, return_exceptions=True)

    assert [type(outcome) for outcome in run(scenario())] == [TypeError, TypeError]


def test_a_run_that_is_ended_tells_every_rank_why_and_asks_no_worker_any_more():
    running = Run(Script(config=make_config()))

    async def scenario():
        ranks = [asyncio.ensure_future(running.batcher.next_items(rank, 0)) for rank in range(2)]
        await running.publish(0)
        await asyncio.sleep(0)
        assert running.generation.open
        running.served.close(WorkerError("no generation worker could load new weights"))
        told = await asyncio.gather(*ranks, return_exceptions=True)
        assert not running.generation.open
        return told

    assert [str(error) for error in run(scenario())] == [
        "no generation worker could load new weights"
    ] * 2


def test_deterministic_rounds_do_not_depend_on_who_finished_first():
    config = make_config(
        deterministic=True, max_staleness=0, train_minibatch_size=2, samples_per_question=4
    )
    sent = []
    for slowest_s in (0.0, 7.0):
        items, _, _ = run(train(Script(config=config, slowest_s=slowest_s)))
        sent.append([[keys([i]) for i in own if isinstance(i, Minibatch)] for own in items])
    assert sent[0] == sent[1]


def test_the_end_of_a_complete_step_comes_with_its_last_round():
    config = make_config(deterministic=True, max_staleness=0, num_training_batches=1)
    running = Run(Script(config=config))

    async def scenario():
        await running.publish(0)
        answers = []
        while not answers or not isinstance(answers[-1][-1], EndOfStep):
            asked = (running.batcher.next_items(rank, len(answers)) for rank in range(2))
            (items, others) = await asyncio.gather(*asked)
            assert list(map(type, items)) == list(map(type, others))
            answers.append(items)
        return answers

    *first, last = run(scenario())
    assert [list(map(type, items)) for items in first] == [[Minibatch]] * len(first)
    assert list(map(type, last)) == [Minibatch, EndOfStep]


@pytest.mark.parametrize("seed", range(3))
def test_every_pass_trains_each_sample_that_was_sent_once_and_the_ledger_admits_it_once(seed):
    """Each rank's later passes are its first one's minibatches; groups fail, are even, are drawn
    again."""
    config = make_config(
        num_passes=3, train_minibatch_size=2, max_staleness=1, dynamic_sampling=1, advantage="dr"
    )
    script = Script(config=config, seed=seed, flaky=frozenset({2}), dropped=frozenset({5}),
                    even=frozenset({1, 7}))  # fmt: skip
    items, status, running = run(train(script))
    passes, fates = [Counter() for _ in range(3)], [Counter() for _ in range(3)]
    for rank, own in enumerate(items):
        held = FirstPass(config.batching)
        for minibatches, end in split_steps(own):
            for minibatch in minibatches:
                held.keep(minibatch)
            held.step_ended(end, [{}] * len(minibatches))
            again = list(held.again(end)) if end.is_last_of_batch else []
            later = split_steps(again)
            assert [e.step_in_batch for _, e in later] == list(range(2, 6)) * bool(later)
            for rounds, each in [(minibatches, end), *later]:
                number = each.step_in_batch // 2
                passes[number].update(keys(rounds))
                fates[number].update(each.fates if rank == 0 else {})
                assert each.num_samples == sum(
                    each.fates[fate] for fate in ("trained", "zero_contribution")
                )
    assert passes[0] == passes[1] == passes[2] and set(passes[0].values()) == {1}
    assert [each["trained"] for each in fates] == [len(passes[0])] * 3
    assert status.done == running.batcher._ledger.admitted_samples
    assert running.batcher._ledger.fates.samples["trained"] == len(passes[0])


def test_the_status_follows_samples_through_the_stages():
    config = make_config(kl_coefficient=0.1, num_training_batches=1)
    running = Run(Script(config=config))

    async def scenario():
        seen = [running.served.status()]
        training = asyncio.ensure_future(running.train())
        while not training.done():
            await asyncio.sleep(0.05)
            seen.append(running.served.status())
        return seen

    seen = run(scenario())
    assert max(status.generating for status in seen) == 12
    assert max(status.verifying for status in seen) > 0
    assert max(status.in_reference for status in seen) > 0
    assert max(status.training for status in seen) > 0
    assert [seen[0].done, seen[-1].done] == [0, 12]
    assert seen[-1].workers == {"generation": 2, "reference": 1}
    lengths = [n for ordinal in range(4) for n in running.script.lengths(ordinal)]
    assert seen[-1].output_tokens == sum(lengths)


def test_dumped_samples_tell_the_same_story(tmp_path):
    config = make_config(output_dir=str(tmp_path), dump_samples_filename="samples.jsonl")
    script = Script(config=config, failing=frozenset({1}), even=frozenset({2}))
    run(train(script))
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    told = {(line["ordinal"], line["index"]): line["fate"] for line in lines}
    trained = {key for step in script.steps for key in script.step(step).trained}
    kept = {(o, i) for o in range(12) if o != 1 for i in range(3)}
    assert len(lines) == len(told)
    assert told.pop((1, 0)) == "failed"
    assert told == {key: "trained" if key in trained else "zero_contribution" for key in kept}
    assert all(line["batch"] == line["ordinal"] // 4 for line in lines)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_group_that_failed_has_a_line_with_its_reason_and_no_reward(has_tokens, tmp_path):
    config = make_config(
        output_dir=str(tmp_path), dump_samples_filename="samples.jsonl", dynamic_sampling=1,
        dump_token_columns=has_tokens,
    )  # fmt: skip
    even = frozenset({4})
    run(train(Script(config=config, failing=frozenset({1}), even=even, failing_later=even)))
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    failed = {line["ordinal"]: line for line in lines if line["fate"] == "failed"}
    assert {*failed} == {1, 4}
    assert [failed[ordinal]["attempt"] for ordinal in (1, 4)] == [0, 1]
    for line in failed.values():
        assert (line["stage"], line["reason"]) == ("verification", "reward scripted: killed")
        assert (line["reward"], line["advantage"], line["verdict"]) == (None, None, "error")
        assert line["input"].startswith("2+2") and not line["given"]
        assert {*lines[0]} <= {*line}


def test_the_status_says_why_episodes_fail_once_a_kind():
    running = Run(Script(config=make_config(), max_rows=3))
    play, lines = running.cluster.play, {2: "mine.py:8", 3: "mine.py:9", 9: "mine.py:8"}

    async def fails(request):
        if line := lines.get(request.ordinal):
            told = f"environment mine.py:Mine raised KeyError({request.ordinal}) at {line}"
            failed = EpisodeFailed(FailureClass.ENVIRONMENT, told)
            failed.place = line
            raise failed
        return await play(request)

    running.cluster.play = fails
    run(running.train())
    told = [*running.served.status().failures.values()]
    assert sorted(sentence.partition(":Mine ")[2].partition(":")[0] for sentence in told) == [
        "raised KeyError(2) at mine.py", "raised KeyError(3) at mine.py",
    ]  # fmt: skip


def test_what_goes_to_ranks_has_no_text():
    items, _, _ = run(train(Script(config=make_config())))
    minibatches = [item for item in items[0] if isinstance(item, Minibatch)]
    texts = (make_question().input, make_completion(WeightsVersion(0, 0)).text)
    assert any(minibatch.samples for minibatch in minibatches)
    assert not any(text.encode() in pickle.dumps(minibatches) for text in texts)


def test_samples_that_the_disk_refuses_are_told_once_and_counted(tmp_path):
    (tmp_path / "file").touch()
    config = make_config(output_dir=str(tmp_path), dump_samples_filename="file/samples.jsonl")
    items, _, _ = run(train(Script(config=config)))
    steps = ends(items[0])
    assert steps[-1].clock["unwritten_samples"] == 36
    told = [notice for end in steps for notice in end.notices]
    for notice, name in zip(told, ("samples.jsonl", "samples.steps.jsonl"), strict=True):
        assert notice.startswith(f"{tmp_path}/file/{name} cannot be written (")


def test_packing_knows_what_attention_costs_in_this_model():
    running, offered = Run(Script(config=make_config())), []
    offer = running.batcher._rounds.offer

    def watched(step, *, item):
        offered.append(item)
        offer(step, item=item)

    running.batcher._rounds.offer = watched
    run(running.train())
    assert len({item.num_tokens for item in offered}) > 3
    for item in offered:
        assert item.cost == pytest.approx(item.num_tokens + item.num_tokens**2 / ATTENTION_RATIO)


def test_an_entropy_bonus_sends_samples_without_advantage():
    config = make_config(entropy_coefficient=0.01, num_training_batches=1)
    items, _, _ = run(train(Script(config=config, even=frozenset({0, 1, 2, 3}))))
    (end,) = ends(items[0])
    assert end.fates["trained"] > 0
    assert end.sums["zero_advantage_samples"] == 12
