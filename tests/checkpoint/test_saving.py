"""A save from the end of a batch to what a resume reads, in one process with a group of its own."""

import weakref
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from learners import make_learner, make_minibatches
from oracle import sent
from torch.distributed.device_mesh import init_device_mesh

from async_grpo.checkpoint.resume import Start, find_start
from async_grpo.checkpoint.saving import Checkpoints
from async_grpo.checkpoint.tensors import restore_learner
from async_grpo.training.fsdp import shard
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Absent, Ranks
from async_grpo.types import EndOfStep
from async_grpo.util import deadlines
from async_grpo.util.waiting import in_background

GOOD, *_ = make_minibatches()


@pytest.fixture
def ranks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


def trained(folder, ranks, *, num_steps):
    plain = make_learner(folder, train_minibatch_size=4, checkpoint_every_batches=1)
    learner = Learner(shard(plain.policy, ranks.mesh), plain.config, ranks)
    for step in range(num_steps):
        learner.accumulate(GOOD)
        learner.update(EndOfStep(step, 0, True, 2, 9, sent=sent(GOOD.samples)))
    return learner


def checkpoints_of(learner, ranks, report, references):
    exports = SimpleNamespace(state=lambda: {"samples": 2, "last_export": -1})
    exports.push = lambda num_samples: None
    return Checkpoints(
        learner, ranks, exports=exports, report=report, hashes=None, references=references
    )


@pytest.mark.parametrize("of_rank_0", [True, False])
def test_what_a_batch_leaves_is_what_a_resume_begins_with(tmp_path, ranks, of_rank_0):
    """Of rank 0, which has counters and references, and of a rank where they are absent."""
    learner = trained(tmp_path, ranks, num_steps=2)
    report = SimpleNamespace(state=lambda: {"steps": 2}, doing=print, sync_files=lambda: None)
    report.stood_still = lambda name, seconds: None
    report.spared_checkpoints = frozenset
    had = (report, lambda batches: {}) if of_rank_0 else (Absent(), Absent().references_to_save)
    checkpoints = checkpoints_of(learner, ranks, *had)
    checkpoints.batch_ended(EndOfStep(1, 0, True, 2, 9))
    checkpoints.wait()
    assert checkpoints.is_complete

    start = find_start(learner.config)
    assert isinstance(start, Start) and start.batches == 2
    again = trained(tmp_path / "again", ranks, num_steps=0)
    restore_learner(again, start)
    assert again.step.clocks == learner.step.clocks
    pairs = zip(again.policy.parameters(), learner.policy.parameters(), strict=True)
    assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)


@pytest.mark.parametrize(("took_s", "age_s", "is_saved"), [(1, 601, 1), (90, 601, 0), (90, 901, 1)])
def test_the_clock_leaves_ten_times_a_save_s_duration_between_two(
    tmp_path, ranks, took_s, age_s, is_saved
):
    learner = trained(tmp_path, ranks, num_steps=1)
    learner.config = learner.config.but(
        checkpoint_every_batches=99, checkpoint_every_minutes=10.0, num_training_batches=99
    )
    checkpoints = checkpoints_of(learner, ranks, Absent(), Absent().references_to_save)
    checkpoints._seconds = took_s
    checkpoints._saved_at -= age_s
    checkpoints.batch_ended(EndOfStep(1, 0, True, 2, 9))
    checkpoints.wait()
    assert (checkpoints._saved == 2) == is_saved


def test_a_disk_that_hangs_is_a_failed_checkpoint_once_a_save_s_time_is_over(tmp_path, ranks):
    learner, counted = trained(tmp_path, ranks, num_steps=1), []
    report = SimpleNamespace(state=dict, doing=print, spared_checkpoints=frozenset)
    report.stood_still = lambda name, seconds: None
    report.checkpoint_failed = lambda: counted.append("failed")
    report.checkpoint_skipped = lambda: counted.append("skipped")
    learner.config = learner.config.but(num_training_batches=99)
    checkpoints = checkpoints_of(learner, ranks, report, lambda batches: {})
    checkpoints._running = SimpleNamespace(result=raises_timeout, done=lambda: False)
    for batch, age_s in ((1, 0), (2, 0), (3, 2000), (4, 0)):
        checkpoints._saved_at -= age_s
        checkpoints.batch_ended(EndOfStep(batch, 0, True, 2, 9))
    assert counted == ["skipped", "failed", "failed"]


def raises_timeout(within_s):
    raise TimeoutError


def test_what_a_save_may_take_grows_with_the_bytes_that_it_writes(tmp_path, ranks):
    """Policy, two moments and a reference in float32, at 0.2 GB a second at least."""
    learner = trained(tmp_path, ranks, num_steps=1)
    num_parameters = sum(each.numel() for each in learner.policy.parameters())
    checkpoints = checkpoints_of(learner, ranks, Absent(), Absent().references_to_save)
    more_s = checkpoints._timeout_s - deadlines.CHECKPOINT_S
    assert more_s == pytest.approx(16 * num_parameters / 0.2e9)


def test_the_end_of_a_save_is_told_once_its_tensors_are_given_up():
    """A thread that still frees them while the interpreter ends aborts the process."""
    begin, told = Event(), []

    def save(tensors):
        def work():
            begin.wait(10)
            return len(tensors)

        return in_background(work, name="save")

    tensors = torch.ones(3)
    saved = save(tensors)
    weakref.finalize(tensors, lambda: told.append(saved.done()))
    del tensors
    begin.set()
    assert saved.result(10) == 3
    assert told == [False]
