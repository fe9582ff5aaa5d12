"""A scorer sharded over processes, held to the same worker with one."""

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import scored_by_ranks
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import VOCAB_SIZE
from test_logprob_worker import folder, save_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.model.scorer import Scorer
from async_grpo.rollout import scorer_ranks
from async_grpo.rollout.scorer_ranks import ScorerRanks, deal
from async_grpo.util.errors import ConfigError, WeightSyncError

__all__ = ["folder"]  # a fixture
SCRIPT = Path(scored_by_ranks.__file__)
TOLERANCE = 1e-6
MOST_CPU = 1.3  # times one rank's seconds
READY_S = 240


def scored(what, folder, num_ranks, out, vocab_size=VOCAB_SIZE):
    """The numbers of a worker of so many ranks, in processes of its own."""
    command = [sys.executable, str(SCRIPT), folder, str(num_ranks), what, str(out)]
    done = subprocess.run(
        [*command, str(vocab_size)], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=READY_S,
    )  # fmt: skip
    return done if what == "killed" else pickle.loads(out.read_bytes())


def largest_difference(found, expected):
    """Over all answers, relative to the largest number among them."""
    pairs = [
        (own, other)
        for answers in zip(found, expected, strict=True)
        for own, other in zip(*answers, strict=True)
    ]
    largest = max(1.0, *(np.abs(other).max() for _, other in pairs))
    return max(np.abs(own - other).max() for own, other in pairs) / largest


def assert_same(found, expected):
    assert largest_difference(found["scores"], expected["scores"]) < TOLERANCE
    for own, other in zip(found["taught"], expected["taught"], strict=True):
        for name in other[0]:
            parts = [[each[name] for each in answers] for answers in (own, other)]
            assert largest_difference(parts[:1], parts[1:]) < TOLERANCE, name
    assert found["head"].keys() == expected["head"].keys()
    for name, array in expected["head"].items():
        assert np.array_equal(found["head"][name], array)


@pytest.mark.integration
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_hold_a_part_each_and_score_moved_weights_as_one_does(num_ranks, folder, tmp_path):
    found = scored("reference", folder, num_ranks, tmp_path / "out")
    expected = asyncio.run(scored_by_ranks.reference(folder, 1, VOCAB_SIZE))
    assert_same(found, expected)
    [whole] = expected["bytes"]
    assert sum(found["bytes"]) == whole
    assert max(found["bytes"]) < 1.02 * whole / num_ranks
    assert found["refused"] == expected["refused"]
    assert "by name and shape, 22 are not, first model.layers.1." in found["refused"]


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_sharded_teacher_sends_the_payloads_and_the_head_that_a_whole_one_does(
    num_ranks, folder, tmp_path
):
    found = scored("teachers", folder, num_ranks, tmp_path / "out")
    expected = asyncio.run(scored_by_ranks.teachers(folder, 1, VOCAB_SIZE))
    assert len(found["taught"]) == len(scored_by_ranks.PAYLOADS)
    assert_same(found, expected)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_by_express_each_rank_of_a_teacher_reads_sequences_of_its_own(num_ranks, folder, tmp_path):
    found = scored("express", folder, num_ranks, tmp_path / "out")
    expected = asyncio.run(scored_by_ranks.express(folder, 1, VOCAB_SIZE))
    assert largest_difference(found["scores"], expected["scores"]) < TOLERANCE
    assert found["num_tokens"] == expected["num_tokens"]  # each is read once


@pytest.mark.integration
@pytest.mark.slow
def test_no_work_is_done_twice(tmp_path):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    one, *others = (
        scored("timed", str(tmp_path / "model"), num_ranks, tmp_path / "out", 2048)
        for num_ranks in (1, 2, 4)
    )
    for found in others:
        assert largest_difference(found["scores"], one["scores"]) < TOLERANCE
        assert sum(found["cpu_s"]) < MOST_CPU * sum(one["cpu_s"])


@pytest.mark.integration
@pytest.mark.slow
def test_a_worker_ends_with_any_of_its_ranks(folder, tmp_path):
    ended = scored("killed", folder, 3, tmp_path / "out")
    assert ended.returncode == 1
    assert "a rank of this scorer has ended: the worker ends, to be started again" in ended.stderr
    pids = list(map(int, ended.stdout.split()))
    assert len(pids) == 3
    until = time.monotonic() + 20
    while any(map(runs, pids)):
        assert time.monotonic() < until
        time.sleep(0.1)


def runs(pid):
    """Whether a process is there, and no zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("payload", [None, scored_by_ranks.PAYLOADS[0]])
def test_a_rank_without_outputs_joins_the_forward_and_answers_nothing(payload, folder):
    scorer, forwards = Scorer(folder, device=torch.device("cpu")), []
    pack = scorer.packed
    scorer.packed = lambda pairs: forwards.append(len(pairs)) or pack(pairs)
    assert scorer_ranks.score(scorer, [], 1.0, VOCAB_SIZE, payload) == []
    assert forwards == [1]


OPEN_FOR_EVER = multiprocessing.Pipe()


class Threads(ScorerRanks):
    """Three ranks of a worker; those above 0 are threads, and the scorer of each is its number."""

    def __init__(self):
        super().__init__(
            SimpleNamespace(num_ranks=3, scorer=lambda rank, port: Numbered(rank))  # options
        )

    def _start(self, options, port):
        for rank in range(1, options.num_ranks):
            here, there = multiprocessing.Pipe()
            self._pipes.append(here)
            there.send(None)  # it is ready
            threading.Thread(target=follow, args=(rank, there), daemon=True).start()
        return [OPEN_FOR_EVER[0]]  # no rank ends


def follow(rank, pipe):
    with contextlib.suppress(EOFError, OSError):  # the test has ended
        while True:
            task, arguments = pipe.recv()
            pipe.send(scorer_ranks._attempt(Numbered(rank), task, arguments))


@pytest.fixture
def ended(monkeypatch):
    """The sentences with which this process would have ended."""
    sentences = []
    monkeypatch.setattr(scorer_ranks, "_end", sentences.append)
    return sentences


class Numbered(int):
    def release(self):
        pass


def slowly(number, what):
    time.sleep(0.001)
    return int(number), what


def refuse(number, which):
    if which:
        raise WeightSyncError(f"refused by {int(number)}")


def divide(number, by):
    return number // by


@pytest.mark.timeout(60)
def test_tasks_that_come_together_get_the_answers_of_their_own_ranks(ended):
    ranks = Threads()
    with ThreadPoolExecutor(8) as pool:
        asked = [[(100 * rank + number,) for rank in range(3)] for number in range(40)]
        found = list(pool.map(lambda arguments: ranks.run(slowly, arguments), asked))
    expected = [list(enumerate(what for (what,) in arguments)) for arguments in asked]
    assert found == expected


def test_after_a_task_that_all_ranks_refuse_the_next_gets_its_own_answers(ended):
    ranks = Threads()
    with pytest.raises(WeightSyncError, match="refused by 0"):
        ranks.run(refuse, [(True,)] * 3)
    assert ranks.run(slowly, [("a",), ("b",), ("c",)]) == [(0, "a"), (1, "b"), (2, "c")]


def test_any_other_error_ends_the_process_because_ranks_may_wait_for_each_other(ended):
    with pytest.raises(ZeroDivisionError):
        Threads().run(divide, [(0,), (1,), (1,)])
    assert ended == ["rank 0 failed: ZeroDivisionError: integer division or modulo by zero"]


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 8), st.integers(100, 400)
)
@example([100, 100, 20], 3, 100)  # the last finds room on the rank with least, not on the first
def test_each_output_is_dealt_once_and_no_rank_gets_more_than_it_may_take(sizes, num_ranks, room):
    *shares, left = deal(sizes, num_ranks, max_tokens=room)
    assert len(shares) == num_ranks
    assert sorted(index for share in (*shares, left) for index in share) == [*range(len(sizes))]
    assert 0 not in left  # there is progress
    assert all(sum(sizes[index] for index in share) <= room for share in shares)
    for index in left:
        assert all(sum(sizes[i] for i in share) + sizes[index] > room for share in shares)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 100))
def test_equal_outputs_are_dealt_evenly(count, num_ranks, size):
    *shares, left = deal([size] * count, num_ranks, max_tokens=100 * count)
    numbers = [len(share) for share in shares]
    assert not left
    assert max(numbers) - min(numbers) <= 1


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"mode": "generation"}, "--scorer-ranks must be 1 with --mode generation, got 2"),
        (
            {"mode": "logprob", "gpus_per_worker": 0.5},
            "--gpus-per-worker must be 1 with --scorer-ranks 2, got 0.5",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(options, refusal):
    with pytest.raises(ConfigError, match=refusal):
        WorkerConfig(**{"model_path": "m", "scorer_ranks": 2} | options)


def test_a_sharded_scorer_takes_a_device_for_each_rank():
    config = WorkerConfig(model_path="m", mode="teacher", name="t", scorer_ranks=4)
    assert config.num_devices == 4
