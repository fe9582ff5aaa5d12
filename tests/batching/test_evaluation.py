"""Held-out questions, graded beside the run."""

import asyncio
import json
from dataclasses import replace

import pytest
from script import Script
from scripted import Registry, make_question, run
from scripted_run import INCARNATION, ROWS, Run, make_config, split_steps

from async_grpo.batching.evaluations import STILL_RUNNING, SetEvaluation, first_seed
from async_grpo.config.evaluation_sets import SAMPLES_PER_QUESTION
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.telemetry.sample_dump import held_out_file
from async_grpo.types import Control, WeightsVersion
from async_grpo.util.errors import NoWorkerError, WorkerError


def evaluate(script, *, num_questions):
    """What came of the first weights' evaluation, and the run, which trains nothing."""
    running = Run(script, held_out=questions(num_questions))

    async def scenario():
        await running.publish(0)
        return await running.served.evaluations.finished()

    (result,) = run(scenario())
    return result, running


def evaluate_set(running, *, version=0, num_at_once=64, **changes):
    """One pass over the unnamed set, of weights that are served."""
    running.cluster.version = version = WeightsVersion(INCARNATION, version)
    plan = replace(running.plan.sets[0], **changes)
    evaluation = SetEvaluation(
        plan, running.served.pipeline, version, None, num_at_once=lambda: num_at_once
    )
    return run(evaluation.run())


def questions(num_questions):
    return tuple(make_question() for _ in range(num_questions))


def make_script(*, dump=None, **changes):
    recording = {"output_dir": str(dump), "dump_samples_filename": "samples.jsonl"} if dump else {}
    config = make_config(
        samples_per_question=SAMPLES_PER_QUESTION, num_training_batches=1, **recording
    )
    return Script(config=config, **changes)


def test_rewards_and_correct_answers_are_counted():
    script = make_script(seed=4)
    result, _ = evaluate(script, num_questions=20)
    rewards = [script.rewards(number) for number in range(20)]
    assert (result.num_questions, result.num_samples, result.num_failed) == (20, 80, 0)
    assert result.reward_sum == pytest.approx(sum(map(sum, rewards)))
    assert result.num_correct == sum(group.count(1.0) for group in rewards)
    assert result.num_solved == sum(1.0 in group for group in rewards)
    assert 0 < result.num_solved < 20


def held_out_lines(folder):
    file = held_out_file(folder / "samples.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_held_out_answers_are_dumped_with_their_set_and_question(tmp_path):
    script = make_script(seed=4, dump=tmp_path)
    result, running = evaluate(script, num_questions=20)
    lines = held_out_lines(tmp_path)
    assert len(lines) == result.num_samples == 80
    rewards = {(n, k): reward for n in range(20) for k, reward in enumerate(script.rewards(n))}
    assert {(line["question"], line["index"]): line["reward"] for line in lines} == rewards
    first = lines[0]
    assert (first["set"], first["fate"], first["batch"]) == ("", "held_out", 0)
    assert first["advantage"] is None
    assert first["ordinal"] == running.config.batching.batch_size - 1


def test_a_run_that_goes_on_from_weights_dumps_their_held_out_answers_once(tmp_path):
    script = make_script(seed=4, dump=tmp_path)
    _, running = evaluate(script, num_questions=3)
    before = held_out_lines(tmp_path)
    running.serve()

    async def again():
        await running.publish(0)
        return await running.served.evaluations.finished()

    run(again())
    keys = [sorted((line["question"], line["index"]) for line in lines)
            for lines in (before, held_out_lines(tmp_path))]  # fmt: skip
    assert keys[0] == keys[1] == [(n, k) for n in range(3) for k in range(SAMPLES_PER_QUESTION)]


def test_questions_are_played_in_the_environment_of_their_type():
    kinds = ("rows", "plain", "rows", "other")
    held_out = [replace(make_question(), dataset_type=kind) for kind in kinds]
    running = Run(make_script(seed=4), held_out=tuple(held_out))
    environments = {"rows": ROWS, "plain": None}
    running.plan = replace(running.plan, environment=ROWS, environments=environments)
    running.serve()
    play = running.cluster.play
    played = []

    async def watched(request):
        played.append((request.question.dataset_type, request.seed))
        if request.ordinal == 3:
            raise EpisodeFailed(FailureClass.TOOL, "the index is down")
        return await play(request)

    running.cluster.play = watched
    result = evaluate_set(running)
    once = [("rows", 0), ("rows", 8)]  # seeds that meet no other
    assert sorted(played) == [*[("other", 12)] * 2, *once]  # what it has lost is played again
    assert (result.num_samples, result.num_failed) == (12, 4)
    assert result.failures == {"environment: tool infrastructure": 4}
    rewards = [running.script.rewards(number) for number in range(3)]
    assert result.reward_sum == pytest.approx(sum(map(sum, rewards)))


def test_questions_that_could_not_be_graded_are_counted_apart():
    failed = frozenset({0, 3, 4})
    script = make_script(failing=frozenset({0, 3}), dropped=frozenset({4}))
    result, _ = evaluate(script, num_questions=6)
    rewards = [script.rewards(number) for number in set(range(6)) - failed]
    assert (result.num_samples, result.num_failed) == (12, 12)
    assert result.failures == {"verification": 8, "generation": 4}
    assert result.reward_sum == pytest.approx(sum(map(sum, rewards)))


def test_a_first_evaluation_in_which_nothing_could_be_graded_ends_the_run():
    running = Run(make_script(failing=frozenset(range(6))), held_out=questions(6))
    told = "none of the held-out questions could be: reward scr"

    async def scenario():
        await running.publish(0)
        with pytest.raises(WorkerError, match=told):
            await running.served.evaluations.finished()
        with pytest.raises(WorkerError, match="could be: reward scr"):
            await running.batcher.next_items(0, 0)

    run(scenario())


def test_a_later_evaluation_ends_nothing():
    running = Run(make_script(failing=frozenset(range(6))), held_out=questions(1))
    result = evaluate_set(running, version=1)
    assert (result.num_samples, result.num_failed) == (0, 4)
    assert result.oldest == result.newest == result.version


def test_an_evaluation_leaves_the_ledger_and_the_run_alone():
    script = make_script()
    _, running = evaluate(script, num_questions=8)
    ledger = running.batcher._ledger
    assert ledger.admitted_slots == 4
    assert ledger.fates.samples["failed"] == 0


def test_workers_that_fail_or_die_cost_an_evaluation_nothing_but_time():
    plain, _ = evaluate(make_script(), num_questions=8)
    script = make_script(flaky=frozenset(range(8)))
    flaky, running = evaluate(script, num_questions=8)
    assert running.cluster.tries[7, 0] == 2
    assert replace(flaky, seconds=plain.seconds) == plain


def test_a_held_out_question_that_kills_workers_fails_alone_and_excludes_no_other():
    result, running = evaluate(make_script(deadly=frozenset({5})), num_questions=7)
    assert (result.num_samples, result.num_failed) == (24, 4)
    assert result.failures == {"quarantine": 4}
    assert running.served.pipeline.workers.quarantine.questions == set()


def test_a_held_out_question_that_no_worker_takes_in_time_is_counted():
    running = Run(make_script(), held_out=questions(3))
    lease, asked = running.generation.lease, []

    def too_late(*cost, **options):
        asked.append(options)
        if len(asked) == 2:
            raise NoWorkerError("nobody was free")
        return lease(*cost, **options)

    running.generation.lease = too_late
    result = evaluate_set(running)
    assert (result.num_samples, result.failures) == (8, {"deadline": 4})


def test_so_many_questions_are_in_work_at_a_time_as_there_is_room_for():
    running, busy, most = Run(make_script(), held_out=questions(30)), 0, 0
    generate = running.cluster.generate

    async def watched(request):
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        try:
            return await generate(request)
        finally:
            busy -= 1

    running.cluster.generate = watched
    assert evaluate_set(running, num_at_once=3).num_samples == 120
    assert most == 3


def test_an_evaluation_that_loses_its_own_worker_takes_less_of_the_others_room():
    running, busy, room = Run(make_script(), held_out=questions(40)), [0], [8]
    generate = running.cluster.generate

    async def watched(request):
        busy[0] += 1
        room[0] = 1 if request.ordinal >= 16 else 8
        late = busy[0] if request.ordinal >= 30 else 0
        assert late <= 1
        await asyncio.sleep(1.0)
        busy[0] -= 1
        return await generate(request)

    running.cluster.generate = watched
    running.cluster.version = version = WeightsVersion(INCARNATION, 0)
    plan, pipeline = running.plan.sets[0], running.served.pipeline
    evaluation = SetEvaluation(plan, pipeline, version, None, num_at_once=lambda: room[0])
    assert run(evaluation.run()).num_samples == 160


class SlowRun(Run):
    """Whose held-out outputs take as long as a test says."""

    def __init__(self, script, *, seconds, num_questions=2):
        super().__init__(script, held_out=questions(num_questions))
        generate = self.cluster.generate

        async def generate_slowly(request):
            if request.priority:
                await asyncio.sleep(seconds)
            return await generate(request)

        self.cluster.generate = generate_slowly
        self.serve()

    def all_results(self):
        """Of the whole run: its steps, then what is waited for at its end."""

        async def scenario():
            streams = await self.train()
            trained_s = asyncio.get_running_loop().time()
            told = [each for _, end in split_steps(streams[0]) for each in end.evaluations]
            assert all(not end.evaluations for _, end in split_steps(streams[-1]))
            return [*told, *await self.served.evaluations.finished()], trained_s

        return run(scenario(), limit_s=1e9)


def test_training_never_waits_for_an_evaluation_and_the_last_is_waited_for():
    def script():
        return Script(
            config=make_config(
                samples_per_question=4, num_training_batches=6, eval_every_batches=1
            ),
            num_ranks=2,
        )

    quick, quick_s = SlowRun(script(), seconds=0.0).all_results()
    slow, slow_s = SlowRun(script(), seconds=10_000.0).all_results()
    assert slow_s == quick_s
    assert [each.version.batches for each in slow if not each.skipped] == [0, 6]
    skipped = [each for each in slow if each.skipped]
    assert [each.version.batches for each in skipped] == [1, 2, 3, 4, 5]
    assert {each.skipped for each in skipped} == {STILL_RUNNING}
    assert sorted(each.version.batches for each in quick) == [*range(7)]  # one result of each


def test_every_set_is_due_by_its_own_interval():
    config = make_config(
        samples_per_question=4,
        num_training_batches=4,
        eval="a=a.jsonl,every=2;b=b.jsonl,samples=2",
        eval_every_batches=0,
    )
    running = SlowRun(Script(config=config, num_ranks=2), seconds=0.0, num_questions=0)
    running.plan = replace(running.plan, named_sets={"a": questions(2), "b": questions(3)})
    running.serve()
    results, _ = running.all_results()
    due = {(each.name, each.version.batches) for each in results}
    assert due == {("a", 0), ("b", 0), ("a", 2), ("a", 4), ("b", 4)}
    sampled = {each.name: each.num_samples for each in results if not each.skipped}
    assert sampled == {"a": 8, "b": 6}


def test_what_somebody_asks_for_is_evaluated_at_the_end_of_the_batch():
    config = make_config(samples_per_question=4, num_training_batches=4)
    running = SlowRun(Script(config=config, num_ranks=2), seconds=0.0)
    publish = running.publish

    async def publish_and_ask(batches):
        await publish(batches)
        if batches == 1:
            running.served.control(Control("a", "evaluate", "me", "now"))

    running.publish = publish_and_ask
    running.served.controls._config = make_config(eval_data_path="h")
    results, _ = running.all_results()
    batches = sorted(each.version.batches for each in results)
    assert len(batches) == 3 and batches[0] == 0 and 1 < batches[1] < 4 and batches[2] == 4


def test_a_result_says_which_weights_have_sampled_it():
    config = make_config(samples_per_question=4, num_training_batches=3)
    running = SlowRun(Script(config=config, num_ranks=2), seconds=10_000.0)
    (first, last), _ = running.all_results()
    assert first.version.batches == 0
    assert (first.oldest.batches, first.newest.batches) == (3, 3)  # nobody could keep the first
    assert (last.version.batches, last.newest.batches) == (3, 3)


def test_a_set_has_its_own_sampling_and_rewards_and_yields_to_training():
    sampled = "samples=2,temperature=0.5,top_p=0.9,max_tokens=6,seed=3,rewards=mine"
    config = make_config(eval=f"hard=h.jsonl,{sampled}")
    running, seen, graded = Run(Script(config=config)), [], []
    running.plan = replace(running.plan, named_sets={"hard": questions(3)})
    generate, verify = running.cluster.generate, running.cluster.verify

    async def watched(request):
        if request.priority:
            seen.append(request)
        return await generate(request)

    async def grading(request):
        graded.append(request.rewards)
        return await verify(request)

    running.cluster.generate, running.cluster.verify = watched, grading
    running.serve()

    async def scenario():
        await running.publish(0)
        return await running.served.evaluations.finished()

    (result,) = run(scenario())
    assert (result.name, result.num_samples) == ("hard", 6)
    sampling = {(r.sampling.temperature, r.sampling.top_p, r.sampling.max_tokens) for r in seen}
    assert sampling == {(0.5, 0.9, 6)}
    assert sorted(r.seed - first_seed(3) for r in seen) == [0, 2, 4]
    assert ("mine",) in graded


def test_the_worker_of_an_evaluation_is_held_and_after_the_last_batch_all_work():
    config = make_config(samples_per_question=4, num_training_batches=1)
    running = Run(Script(config=config), held_out=questions(2))
    workers = Registry(running.cluster, running.cluster)
    running.generation = workers
    running.serve()
    running.cluster.registry = workers

    async def scenario():
        streams = await running.train()
        told = [each for _, end in split_steps(streams[0]) for each in end.evaluations]
        return [*told, *await running.served.evaluations.finished()]

    results = run(scenario())
    held = [hold.worker_id for hold in workers.holds if hold]
    assert [each.version.batches for each in results] == [0, 1]
    assert held == ["w0", "w0"]  # of the first two questions; the last two are anybody's


def test_other_seeds_begin_elsewhere_in_the_bits_that_every_generator_reads():
    assert len({first_seed(seed) % 2**32 // 1_000_000 for seed in range(20)}) == 20
