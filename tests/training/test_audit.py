"""A step whose ranks trained other samples than they were sent is never taken."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learners import make_learner
from oracle import make_sample, oracle_twin, random_samples, sent, tiny_model
from ranks import run_ranks

from async_grpo.model.collate import collate
from async_grpo.training.meters import Timers
from async_grpo.training.recorder import Recorder
from async_grpo.types import EndOfStep, Minibatch, Tally, digest_of
from async_grpo.util.errors import AuditError

PAIR = [  # of one length
    make_sample([1, 2], [3, 4, 5], reference=[0.0] * 3, ordinal=ordinal) for ordinal in (7, 8)
]


def make_samples(count=6):
    samples = random_samples(
        np.random.default_rng(1), count, model=oracle_twin(tiny_model(tied=True))
    )
    return [replace(s, attempt=s.ordinal % 2) for s in samples if s.num_trained_tokens]


def ended(*ranks, **options):
    return EndOfStep(1, 1, True, num_samples=9, num_tokens=99, sent=sent(*ranks, **options))


def trained_by(samples, packed):
    """A recorder of one minibatch, whose step counts what was packed."""
    step = SimpleNamespace(
        losses=[torch.tensor(0.0)],
        backpropagated=(packed.num_samples, packed.target_ids.numel()),
        timers=Timers(torch.device("cpu")),
    )
    recorder = Recorder(None, step)
    recorder.keep(Minibatch(0, tuple(samples)), packed)
    return recorder


def drop_one(samples):
    return samples[1:]


def train_one_twice(samples):
    return [*samples, samples[-1]]


def swap_for_a_twin(samples):
    """As many samples and tokens as before: one is lost, another of its length trained twice."""
    return [PAIR[0] if sample is PAIR[1] else sample for sample in samples]


FAULTS = [drop_one, train_one_twice, swap_for_a_twin]


@pytest.mark.parametrize("aggregation", ["sample-mean", "token-mean"])
def test_a_step_in_which_all_was_trained_is_taken(tmp_path, aggregation):
    learner, samples = make_learner(tmp_path, aggregation=aggregation), make_samples()
    learner.accumulate(Minibatch(0, tuple(samples[3:])))
    learner.accumulate(Minibatch(1, ()))
    learner.accumulate(Minibatch(2, tuple(samples[:3])))
    assert learner.update(ended(samples, aggregation=aggregation)).clocks.steps == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_is_lost_or_trained_twice_ends_the_run_before_the_update(tmp_path, fault):
    learner, samples = make_learner(tmp_path), [*make_samples(), *PAIR]
    before = [parameter.detach().clone() for parameter in learner.policy.parameters()]
    learner.accumulate(Minibatch(0, tuple(fault(samples))))
    with pytest.raises(AuditError, match=f"in gradient step 4 rank 0 .*, {len(samples)} samples"):
        learner.update(ended(samples))
    assert all(map(torch.equal, before, learner.policy.parameters()))


def test_a_minibatch_that_is_packed_with_other_weights_ends_the_run():
    packed = collate(PAIR, aggregation="sample-mean")
    recorder = trained_by(PAIR, replace(packed, weights=packed.weights * (1 + 1e-5)))
    with pytest.raises(AuditError, match=r"weight 2 .* weight 2\.00002"):
        recorder.audit(ended(PAIR), number=1)


def test_a_minibatch_that_is_backpropagated_twice_ends_the_run_before_the_update(tmp_path):
    learner, samples = make_learner(tmp_path), make_samples()
    minibatch = Minibatch(0, tuple(samples))
    learner.accumulate(minibatch)
    learner.step.accumulate(collate(samples, aggregation="sample-mean"))  # behind the audit's back
    with pytest.raises(AuditError, match=f"but trained {2 * len(samples)} samples"):
        learner.update(ended(samples))


@pytest.mark.parametrize(
    ("aggregation", "counted"), [("sample-mean", "num_samples"), ("token-mean", "num_tokens")]
)
def test_a_divisor_below_what_was_trained_ends_the_run_before_the_update(
    tmp_path, aggregation, counted
):
    learner, samples = make_learner(tmp_path, aggregation=aggregation), make_samples()
    before = [parameter.detach().clone() for parameter in learner.policy.parameters()]
    learner.accumulate(Minibatch(0, tuple(samples)))
    num_tokens = sum(sample.num_trained_tokens for sample in samples)
    trained = len(samples) if counted == "num_samples" else num_tokens
    end = replace(ended(samples, aggregation=aggregation), **{counted: trained - 1})
    with pytest.raises(AuditError, match=f"step 4 must count all that was trained, {trained}, it"):
        learner.update(end)
    assert all(map(torch.equal, before, learner.policy.parameters()))


def test_an_unfinished_step_that_is_discarded_is_not_counted(tmp_path):
    learner, samples = make_learner(tmp_path), make_samples()
    learner.accumulate(Minibatch(0, tuple(samples[:2])))
    learner.discard()
    learner.accumulate(Minibatch(0, tuple(samples)))
    assert not learner.update(ended(samples)).skipped


def test_the_digest_tells_runs_attempts_and_members_apart():
    sample = PAIR[0]
    others = [replace(sample, **{name: 1}) for name in ("ordinal", "attempt", "index")]
    keys = [each.key for each in (sample, *others)]
    digests = {digest_of([key], incarnation=incarnation) for key in keys for incarnation in (0, 1)}
    assert len(digests) == 8


def test_the_sum_of_digests_wraps_around():
    tally = Tally(1, 1, (1 << 64) - 1, 1.0)
    assert tally.plus(tally) == Tally(2, 2, (1 << 64) - 2, 2.0)


def audit_of_a_rank(rank, *, fault):
    """The error of each of two ranks, of which the second suffers the fault."""
    samples = [*make_samples(), *PAIR]
    by_rank = [samples[:3], samples[3:]]
    trained = fault(by_rank[1]) if rank else by_rank[0]
    recorder = trained_by(trained, collate(trained, aggregation="sample-mean"))
    try:
        recorder.audit(ended(*by_rank), number=3)
    except AuditError as error:
        return str(error)
    return ""


@pytest.mark.integration
@pytest.mark.parametrize("fault", [list, *FAULTS])
def test_all_ranks_end_and_name_the_one_that_differs(tmp_path, fault):
    errors = run_ranks(audit_of_a_rank, num_ranks=2, folder=tmp_path, fault=fault)
    assert errors[0] == errors[1]
    assert bool(errors[0]) == (fault is not list)
    if errors[0]:
        assert errors[0].startswith("in gradient step 3 rank 1 must train what it was sent")


def test_a_stream_that_tells_nothing_of_what_it_sent_is_refused(tmp_path):
    learner = make_learner(tmp_path)
    learner.accumulate(Minibatch(0, tuple(PAIR)))
    with pytest.raises(AuditError, match="must be sent to 1 ranks, its end tells of 0"):
        learner.update(EndOfStep(0, 0, False, num_samples=2, num_tokens=6))
