import asyncio
import json
import sys
from dataclasses import replace

import pytest
from players import make_turn
from scripted import Handle, make_sample, make_verdict, run
from scripted_run import make_config

from async_grpo.batching import sample_log
from async_grpo.batching.sample_log import SampleLog
from async_grpo.environments.episode import EpisodePolicy
from async_grpo.run import companions
from async_grpo.run.companions import RunRecorder
from async_grpo.types import (
    EndOfStep,
    Group,
    Minibatch,
    SamplingContract,
    VersionSpan,
    WeightsVersion,
)
from async_grpo.util.deadlines import RECORDER_FLUSH_S
from async_grpo.util.errors import ProcessLostError

VERSION = WeightsVersion(9, 3)


def write(log, ordinal, *samples):
    samples = samples or (make_sample(VERSION, ordinal=ordinal),)
    log.write(Group(ordinal, 2, samples), batch=4, fates=("trained",) * len(samples))


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_line_says_what_became_of_a_sample(has_tokens, tmp_path):
    spans = (VersionSpan(VERSION, 0, 1), VersionSpan(WeightsVersion(9, 4), 1, 4))
    verdict = make_verdict(0.5, format_reward=0.25)
    samples = (
        make_sample(VERSION, ordinal=8, index=0, verdict=verdict, advantage=0.7, spans=spans),
        make_sample(VERSION, ordinal=8, index=1, advantage=0.0, finish_reason="length"),
    )

    async def scene():
        recorder = RunRecorder(str(tmp_path / "samples.jsonl"))
        log = SampleLog(Handle(recorder), has_tokens=has_tokens)
        log.write(Group(8, 2, samples), batch=4, fates=("trained", "zero_contribution"))
        await log.flush()

    run(scene())
    first, second = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    columns = {
        "batch": 4,
        "ordinal": 8,
        "attempt": 2,
        "index": 0,
        "fate": "trained",
        "given": False,
        "dataset_type": "",
        "input": "2+2=",
        "output": "four",
        "answer": "4",
        "reward": 0.5,
        "format_reward": 0.25,
        "overlong_penalty": 0.0,
        "kl_penalty": 0.0,
        "advantage": 0.7,
        "verdict": "scored",
        "adapter": "scripted",
        "reason": "",
        "finish_reason": "stop",
        "num_input_tokens": len(samples[0].question.input_token_ids),
        "num_output_tokens": 4,
        "num_trained_tokens": 4,
        "workers": [samples[0].episode.turns[0].worker_id],
        "weights_versions": [[[str(span.version), span.start, span.stop] for span in spans]],
    }
    tokens = {
        "input_token_ids": [samples[0].question.input_token_ids.tolist()],
        "output_token_ids": [samples[0].episode.rows[0].token_ids.tolist()],
        "loss_mask": [samples[0].episode.rows[0].loss_mask.tolist()],
        "behaviour_logprobs": [samples[0].episode.rows[0].logprobs.tolist()],
        "reference_logprobs": [None],
        "scores": {},
    }
    assert first == (columns | tokens if has_tokens else columns)
    assert (second["fate"], second["finish_reason"]) == ("zero_contribution", "length")


class Recorder:
    """Answers what the test says, when the test lets it."""

    def __init__(self):
        self.calls, self.free, self.answer = [], asyncio.Event(), (0, ())

    async def write(self, writer, next_ordinal, groups):
        self.calls.append((writer, next_ordinal, len(groups)))
        await self.free.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_groups_that_finish_while_the_recorder_writes_travel_together():
    async def scene():
        recorder = Recorder()
        log = SampleLog(Handle(recorder), next_ordinal=7)
        write(log, 7)
        await asyncio.sleep(0)
        write(log, 8)
        write(log, 9)
        recorder.free.set()
        await log.flush()
        ((writer, _, _), _) = recorder.calls
        assert recorder.calls == [(writer, 7, 1), (writer, sys.maxsize, 2)]  # nothing is cut twice

    run(scene())


def test_a_step_waits_a_moment_for_a_recorder_that_is_stuck_and_no_longer():
    async def scene():
        log = SampleLog(Handle(Recorder()))
        write(log, 0)
        clock = asyncio.get_running_loop().time
        started = clock()
        await log.flush()
        assert clock() - started == RECORDER_FLUSH_S

    run(scene())


def test_what_does_not_fit_in_the_queue_is_counted_and_said_once(monkeypatch):
    monkeypatch.setattr(sample_log, "MAX_QUEUED_BYTES", 1500)

    async def scene():
        recorder = Recorder()
        log = SampleLog(Handle(recorder))
        for ordinal in range(5):
            await asyncio.sleep(0)
            write(log, ordinal, *[make_sample(VERSION, ordinal=ordinal) for _ in range(3)])
        assert log.num_lost == 6  # one group is under way, two wait
        (notice,) = log.take_notices()
        assert notice.startswith("the run's recorder is slower than the run: the run goes on, and ")
        recorder.free.set()
        await log.flush()
        assert [number for _, _, number in recorder.calls] == [1, 2]
        write(log, 9)
        await log.flush()
        assert (log.num_lost, len(recorder.calls)) == (6, 3)

    run(scene())


def test_a_recorder_that_dies_costs_the_samples_that_it_was_sent_and_no_later_ones():
    async def scene():
        recorder = Recorder()
        recorder.answer = 2, ()  # that its disk had refused
        recorder.free.set()
        log = SampleLog(Handle(recorder), next_ordinal=5)
        write(log, 5)
        await log.flush()
        recorder.answer = ProcessLostError("the run's recorder died")
        write(log, 6)
        await asyncio.sleep(1)
        write(log, 7)  # while it is away
        write(log, 8)
        await asyncio.sleep(10)
        assert log.num_lost == 3
        assert log.take_notices() == (
            "the run's recorder died: it is started again, the run goes on, and 1 samples that it "
            "was sent are missing from the dump",
        )
        recorder.answer = 0, ()
        await asyncio.sleep(5)
        assert log.num_lost == 3
        sent = [(first, number) for _, first, number in recorder.calls]
        assert sent[:2] == [(5, 1), (sys.maxsize, 1)] and sent[-1] == (sys.maxsize, 2)
        assert {number for _, number in sent[2:-1]} == {0}
        recorder.answer = ProcessLostError("the run's recorder died")
        write(log, 9)
        await asyncio.sleep(1)
        assert len(log.take_notices()) == 1, "each death is told"

    run(scene())


def test_a_recorder_that_dies_before_its_first_answer_cuts_the_dump_back_again():
    async def scene():
        recorder = Recorder()
        recorder.answer = ProcessLostError("the run's recorder died")
        recorder.free.set()
        log = SampleLog(Handle(recorder), next_ordinal=5)
        write(log, 5)
        await asyncio.sleep(0.5)
        recorder.answer = 0, ()
        write(log, 6)
        await asyncio.sleep(5)
        firsts = [(first, number) for _, first, number in recorder.calls]
        assert firsts == [(5, 1), (5, 0), (sys.maxsize, 1)]

    run(scene())


def test_the_samples_that_a_disk_refuses_are_among_the_lost():
    async def scene():
        recorder = Recorder()
        recorder.answer = (3, ("the disk is full",))
        recorder.free.set()
        log = SampleLog(Handle(recorder))
        write(log, 0)
        await log.flush()
        assert (log.num_lost, log.take_notices()) == (3, ("the disk is full",))

    run(scene())


def test_without_a_recorder_nothing_is_sent():
    log = SampleLog(None)
    write(log, 0)
    run(log.flush())
    assert log.num_lost == 0


def test_an_episode_of_many_turns_is_told_turn_by_turn(tmp_path, monkeypatch):
    class Numbers:
        decode = staticmethod(lambda ids: " ".join(map(str, ids)))

    monkeypatch.setattr(companions, "find_tokenizer", lambda model: Numbers)
    answers = iter([[7, 8], [9], [3]])

    async def generate(history, sampling, prefer):
        return replace(make_turn(next(answers), version=VERSION), text="said")

    async def scene():
        policy = EpisodePolicy(generate, sampling=SamplingContract(1.0, (1,), 4), max_row_tokens=99)
        await policy.sample([5, 6])
        await policy.sample([5, 6, 7, 8, 60, 61])
        await policy.sample([6, 6])  # its history is rewritten
        sample = replace(make_sample(VERSION, ordinal=8), episode=policy.episode())
        log = SampleLog(Handle(companions.RunRecorder(str(tmp_path / "samples.jsonl"))))
        log.write(Group(8, 0, (sample,)), batch=4, fates=("trained",))
        await log.flush()

    run(scene())
    (line,) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    model = {"role": "model", "text": "said", "finish_reason": "stop", "worker": ""}
    one = [[str(VERSION), 0, 1]]
    of_two = [[str(VERSION), 0, 2], [str(VERSION), 4, 5]]
    assert line["weights_versions"] == [of_two, one]  # a list a row, however many there are
    assert line["turns"] == [
        {"role": "environment", "row": 0, "text": "5 6", "num_tokens": 2},
        model | {"row": 0, "num_tokens": 2, "weights_versions": [[str(VERSION), 0, 2]]},
        {"role": "environment", "row": 0, "text": "60 61", "num_tokens": 2},
        model | {"row": 0, "num_tokens": 1, "weights_versions": one},
        {"role": "environment", "row": 1, "text": "6 6", "num_tokens": 2},
        model | {"row": 1, "num_tokens": 1, "weights_versions": one},
    ]


def test_a_step_says_which_rank_was_sent_what_in_which_round(tmp_path):
    def part(ordinal, index):
        return replace(make_sample(VERSION, ordinal=ordinal, index=index), attempt=1)

    async def scene(*, next_ordinal, num_steps):
        log = SampleLog(
            Handle(RunRecorder(str(tmp_path / "samples.jsonl"))), next_ordinal=next_ordinal
        )
        for step in range(next_ordinal // 2, num_steps):
            first, second = part(2 * step, 0), part(2 * step, 1)
            log.sent([Minibatch(0, (first,)), Minibatch(0, (second,))])
            log.sent([Minibatch(1, ()), Minibatch(1, (part(2 * step + 1, 0),))])
            end = EndOfStep(*divmod(step, 2), step % 2 == 1, num_samples=3, num_tokens=9)
            await log.end_step(end, config.batching, ratio_mode=config.mode)

    config = make_config(batch_size=4, train_minibatch_size=2)
    run(scene(next_ordinal=0, num_steps=3))
    steps = (tmp_path / "samples.steps.jsonl").read_text()
    lines = [json.loads(line) for line in steps.splitlines()]
    assert lines[2] == {
        "batch": 1, "ordinal": 4, "step_in_batch": 0, "step": 3, "num_samples": 3, "num_tokens": 9,
        "ratio_mode": config.mode,
        "rounds": [[[[4, 1, 0, 0]], [[4, 1, 1, 0]]], [[], [[5, 1, 0, 0]]]],
    }  # fmt: skip
    run(scene(next_ordinal=2, num_steps=3))  # goes on behind the first step
    assert (tmp_path / "samples.steps.jsonl").read_text() == steps
