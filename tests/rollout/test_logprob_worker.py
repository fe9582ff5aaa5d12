"""The reference worker in this process, with a real model and no Ray."""

import asyncio
import dataclasses
import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import VOCAB_SIZE, make_sample, oracle_logprobs, oracle_twin, tiny_model
from scored_by_ranks import Reference
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from async_grpo.rollout.logprob_worker import LogprobWorker
from async_grpo.rollout.scorer_ranks import score
from async_grpo.types import LogprobRequest, Pulse, WeightsVersion
from async_grpo.util.errors import StaleAnswerError, WeightSyncError, WorkerError
from async_grpo.weight_sync.buckets import pack

FIRST, SECOND = WeightsVersion(4, 0), WeightsVersion(4, 1)
TEMPERATURE = 0.7
MODELS = {FIRST: tiny_model(tied=True, seed=1), SECOND: tiny_model(tied=True, seed=2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose weights are neither FIRST nor SECOND."""
    folder = tmp_path_factory.mktemp("reference")
    tiny_model(tied=True, seed=0).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def save_tokenizer(folder):
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


@pytest.fixture
def worker(folder):
    return LogprobWorker(folder, worker_id="r0", max_tokens=200)


def snapshot(version, *, names=lambda name: name, among=""):
    named = MODELS[version].named_parameters()
    tensors = ((names(name), p) for name, p in named if among in name)
    put = lambda data: Reference(data.copy())  # noqa: E731
    found = pack(tensors, put=put, version=version, bucket_bytes=8_000)
    assert len(found.buckets) > 3
    return found


def make_request(seed, *, version=FIRST, num_outputs=3, longest=20):
    rng = np.random.default_rng(seed)
    outputs = (rng.integers(VOCAB_SIZE, size=rng.integers(1, longest)) for _ in range(num_outputs))
    return LogprobRequest(
        (rng.integers(VOCAB_SIZE, size=rng.integers(1, longest)).astype(np.int32),) * num_outputs,
        tuple(output.astype(np.int32) for output in outputs),
        TEMPERATURE,
        version,
    )


def error_of(request, scores, *, version=None):
    """Largest |worker - one unpacked float64 forward a sample| over a request's tokens."""
    twin = oracle_twin(MODELS[version or request.version])
    rows = zip(request.prompt_token_ids, request.output_token_ids, scores, strict=True)
    with torch.no_grad():
        return max(
            np.abs(
                oracle_logprobs(twin, make_sample(prompt, ids), temperature=TEMPERATURE).numpy()
                - got
            ).max()
            for prompt, ids, got in rows
        )


def count_forwards(worker):
    """The sizes in outputs of all forwards from now on, while they happen."""
    sizes, score = [], worker._scorer.score

    def counted(pairs, **setting):
        sizes.append(len(pairs))
        return score(pairs, **setting)

    worker._scorer.score = counted
    return sizes


def test_many_requests_at_once_get_what_each_would_get_alone(worker):
    requests = [make_request(seed) for seed in range(24)]

    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        sizes = count_forwards(worker)
        return await asyncio.gather(*map(worker.logprobs, requests)), sizes

    answers, sizes = asyncio.run(scenario())
    for request, scores in zip(requests, answers, strict=True):
        assert [score.dtype for score in scores] == [np.float32] * 3
        assert error_of(request, scores) < 1e-5
    assert sum(sizes) == 72
    assert len(sizes) < 24  # they shared forwards


class TwoRanks:
    """Of a worker, in turn by one model; `shares`: tokens of each rank's outputs, by forward."""

    num_ranks = 2

    def __init__(self, scorer):
        self._scorer, self.shares = scorer, []

    def run(self, task, arguments):
        if task is score:
            self.shares.append([[len(ids) for _, ids in pairs] for pairs, *_ in arguments])
        return [task(self._scorer, *own) for own in arguments]


def test_a_forward_fills_all_ranks_and_what_no_rank_has_room_for_comes_next(worker):
    """Three outputs fit into the tokens of both ranks, and each rank has room for one."""
    request = make_request(1, num_outputs=5)
    sizes = [120, 121, 122, 123, 124]
    random = np.random.default_rng(0)
    long = tuple(random.integers(VOCAB_SIZE, size=size).astype(np.int32) for size in sizes)
    request = dataclasses.replace(request, output_token_ids=long)

    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        worker._ranks = TwoRanks(worker._scorer)
        return await worker.logprobs(request)

    assert error_of(request, asyncio.run(scenario())) < 1e-5
    assert worker._ranks.shares == [[[120], [121]], [[122], [123]], [[], [124]]]


def test_an_idle_model_answers_at_once(worker):
    request = make_request(0)

    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        await worker.logprobs(request)
        seconds = []
        for _ in range(20):
            started = time.monotonic()
            worker._scorer.score(
                list(zip(request.prompt_token_ids, request.output_token_ids, strict=True)),
                temperature=TEMPERATURE,
            )
            alone = time.monotonic() - started
            started = time.monotonic()
            await worker.logprobs(request)
            seconds.append(time.monotonic() - started - alone)
        return seconds

    assert min(asyncio.run(scenario())) < 0.02  # a wait for others would be in each of them


async def start_loading(worker, version):
    """(the task that loads new weights, an event that lets it end); it has the model already."""
    started, finish, load = threading.Event(), threading.Event(), worker._scorer.load

    def slow(tensors, **options):
        started.set()
        assert finish.wait(60)
        load(tensors, **options)

    worker._scorer.load = slow
    loading = asyncio.create_task(worker.load_weights(snapshot(version)))
    assert await asyncio.to_thread(started.wait, 60)
    return loading, finish


async def in_line(worker, request):
    """A request that waits for the model."""
    task = asyncio.create_task(worker.logprobs(request))
    await asyncio.sleep(0)
    assert len(worker._line) == len(request.output_token_ids)
    return task


def test_requests_that_come_while_weights_load_are_answered_afterwards(worker):
    request = make_request(3, version=SECOND)

    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        loading, finish = await start_loading(worker, SECOND)
        early = await in_line(worker, request)
        finish.set()
        return await loading, await early

    ack, scores = asyncio.run(scenario())
    assert ack.version == SECOND
    assert error_of(request, scores) < 1e-5


def test_weights_that_are_not_sent_stay_those_of_the_folder(worker, folder):
    some = dataclasses.replace(snapshot(SECOND, among="mlp"), rest_of_folder=True)
    asyncio.run(worker.load_weights(some))
    own, sent = tiny_model(tied=True, seed=0).state_dict(), MODELS[SECOND].state_dict()
    assert 0 < sum("mlp" in name for name in own) < len(own)
    for name, parameter in worker._scorer.policy.model.named_parameters():
        assert torch.equal(parameter, (sent if "mlp" in name else own)[name])


def test_some_weights_are_refused_where_the_others_are_no_longer_the_folders(worker):
    asyncio.run(worker.load_weights(snapshot(FIRST)))
    some = dataclasses.replace(snapshot(SECOND, among="mlp"), rest_of_folder=True)
    with pytest.raises(WeightSyncError, match="all were sent before: start the worker again"):
        asyncio.run(worker.load_weights(some))


def test_a_logprob_worker_takes_no_adapter(worker):
    with pytest.raises(WeightSyncError, match="publish them merged"):
        asyncio.run(worker.load_weights(dataclasses.replace(snapshot(FIRST), adapter="{}")))


def test_nobody_gets_scores_of_other_weights_than_were_asked(worker):
    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        loading, finish = await start_loading(worker, SECOND)
        late = await in_line(worker, make_request(3, version=FIRST))
        finish.set()
        await loading
        return await asyncio.gather(
            late,
            worker.logprobs(make_request(1, version=WeightsVersion(5, 1))),
            worker.logprobs(make_request(1, version=SECOND)),
            return_exceptions=True,
        )

    late, foreign, good = asyncio.run(scenario())
    assert isinstance(late, StaleAnswerError)
    assert "weights 4.0 were asked, 4.1 are served" in str(late)
    assert isinstance(foreign, StaleAnswerError)
    assert error_of(make_request(1, version=SECOND), good) < 1e-5


def test_before_any_weights_nothing_is_scored(worker):
    assert asyncio.run(worker.ping()).serves == "none"
    with pytest.raises(StaleAnswerError, match=r"4\.0 were asked, None are served"):
        asyncio.run(worker.logprobs(make_request(0)))


def test_weights_that_are_not_newer_change_nothing(worker):
    async def scenario():
        await worker.load_weights(snapshot(SECOND))
        ack = await worker.load_weights(snapshot(FIRST))
        request = make_request(0, version=SECOND)
        return ack, await worker.logprobs(request), await worker.ping()

    ack, scores, pulse = asyncio.run(scenario())
    assert (ack.worker_id, ack.version, pulse.serves) == ("r0", SECOND, "4.1")
    assert error_of(make_request(0, version=SECOND), scores) < 1e-5


def test_refused_weights_leave_the_old_ones_whole(worker):
    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        renamed = snapshot(SECOND, names=lambda name: name.replace("layers.1.", "layers.7."))
        broken = dataclasses.replace(
            snapshot(SECOND), buckets=tuple(map(flip_a_byte, snapshot(SECOND).buckets))
        )
        for refused in (renamed, broken):
            with pytest.raises(WeightSyncError):
                await worker.load_weights(refused)
        return await worker.logprobs(make_request(0))

    before = num_staged()  # by engines of other tests in this process
    assert error_of(make_request(0), asyncio.run(scenario())) < 1e-5
    gc.collect()  # of the frames of errors
    assert num_staged() <= before  # none is kept in memory


def num_staged():
    """Files of staged weights that this process has open."""
    descriptors = Path("/proc/self/fd").iterdir()
    names = [os.readlink(each) for each in descriptors if each.is_symlink()]
    return sum("async-grpo-weights" in name for name in names)


def flip_a_byte(bucket):
    data = bucket.data.value.copy()
    data[len(data) // 2] ^= 1
    return dataclasses.replace(bucket, data=Reference(data))


def test_a_caller_that_goes_away_harms_nobody(worker):
    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        callers = [asyncio.create_task(worker.logprobs(make_request(s))) for s in range(8)]
        await asyncio.sleep(0)
        for caller in callers[::2]:
            caller.cancel()
        answers = await asyncio.gather(*callers, return_exceptions=True)
        return answers, await worker.logprobs(make_request(99))

    answers, last = asyncio.run(scenario())
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
    for seed in (1, 3, 5, 7):
        assert error_of(make_request(seed), answers[seed]) < 1e-5
    assert error_of(make_request(99), last) < 1e-5


def test_a_forward_that_fails_is_told_to_its_callers_only(worker):
    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        good = worker._scorer.score

        def fails_once(pairs, **setting):
            worker._scorer.score = good
            raise RuntimeError("out of memory")

        worker._scorer.score = fails_once
        with pytest.raises(WorkerError, match="RuntimeError: out of memory"):
            await worker.logprobs(make_request(0))
        return await worker.logprobs(make_request(1))

    assert error_of(make_request(1), asyncio.run(scenario())) < 1e-5


def test_aborted_requests_end_and_later_ones_are_served(worker):
    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        loading, finish = await start_loading(worker, SECOND)
        waiting = await in_line(worker, make_request(0))
        await worker.abort_all()
        finish.set()
        await loading
        with pytest.raises(WorkerError, match="aborted"):
            await waiting
        return await worker.logprobs(make_request(1, version=SECOND))

    assert error_of(make_request(1, version=SECOND), asyncio.run(scenario())) < 1e-5


def test_pulses_tell_of_who_has_no_answer_and_work_that_is_given_up_is_not_done(worker):
    kept = dataclasses.replace(make_request(0, version=SECOND), lease_id=5)
    given_up = dataclasses.replace(make_request(1, version=SECOND), lease_id=6)

    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        sizes = count_forwards(worker)
        loading, finish = await start_loading(worker, SECOND)
        waiting = await in_line(worker, kept)
        leaving = asyncio.create_task(worker.logprobs(given_up))
        await asyncio.sleep(0)
        before = await worker.ping()
        leaving.cancel()
        finish.set()
        await asyncio.gather(waiting, leaving, loading, return_exceptions=True)
        return before, sizes, await worker.ping()

    before, sizes, after = asyncio.run(scenario())
    assert before == Pulse("4.0", 0, {5: (0, True, None), 6: (0, True, None)})
    assert sizes == [len(kept.output_token_ids)]
    assert after == Pulse("4.1", kept.num_tokens, {})


def test_a_request_that_can_never_fit_is_refused_whole(worker):
    request = make_request(0)
    long = dataclasses.replace(
        request,
        prompt_token_ids=(*request.prompt_token_ids, request.prompt_token_ids[0]),
        output_token_ids=(*request.output_token_ids, np.zeros(200, np.int32)),
    )

    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        sizes = count_forwards(worker)
        with pytest.raises(WorkerError, match="must fit the 200 tokens of worker r0"):
            await worker.logprobs(long)
        await asyncio.sleep(0.05)
        return sizes

    assert asyncio.run(scenario()) == []


def test_another_temperature_than_the_workers_is_refused(folder):
    worker = LogprobWorker(folder, worker_id="r0", max_tokens=200, temperature=1.0)

    async def scenario():
        await worker.load_weights(snapshot(FIRST))
        await worker.logprobs(make_request(0))

    with pytest.raises(WorkerError, match=r"serves the temperature 1\.0 only, got 0\.7"):
        asyncio.run(scenario())


def test_unchanged_weights_are_renamed_without_being_fetched_unless_they_are_missing(folder):
    alias = snapshot(SECOND).renamed(WeightsVersion(4, 5))
    lost = dataclasses.replace(
        alias, buckets=tuple(dataclasses.replace(bucket, data=None) for bucket in alias.buckets)
    )
    request = make_request(3, version=alias.version)

    async def scenario():
        holder = LogprobWorker(folder, worker_id="holder", max_tokens=200)
        other = LogprobWorker(folder, worker_id="other", max_tokens=200)
        await holder.load_weights(snapshot(SECOND))
        await other.load_weights(snapshot(FIRST))
        acks = [await holder.load_weights(lost), await other.load_weights(alias)]
        return acks, [await worker.logprobs(request) for worker in (holder, other)]

    acks, answers = asyncio.run(scenario())
    assert [ack.version for ack in acks] == [alias.version] * 2
    for scores in answers:
        assert error_of(dataclasses.replace(request, version=SECOND), scores) < 1e-5


def test_a_teacher_scores_with_the_weights_of_its_folder_and_takes_no_others(folder):
    teacher = LogprobWorker(folder, role="teacher:math", worker_id="t0", max_tokens=200)
    asked = make_request(1, version=None)

    async def scenario():
        before = await teacher.logprobs(asked)
        with pytest.raises(WeightSyncError, match=r"a teacher:math worker keeps the weights"):
            await teacher.load_weights(snapshot(FIRST))
        return before, await teacher.logprobs(asked)

    before, after = asyncio.run(scenario())
    twin = oracle_twin(tiny_model(tied=True, seed=0))
    for prompt, ids, scores in zip(
        asked.prompt_token_ids, asked.output_token_ids, before, strict=True
    ):
        with torch.no_grad():
            expected = oracle_logprobs(twin, make_sample(prompt, ids), temperature=TEMPERATURE)
        assert np.abs(expected.numpy() - scores).max() <= 1e-5
    assert all(map(np.array_equal, before, after))
