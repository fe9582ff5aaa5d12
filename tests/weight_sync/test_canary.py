"""The canary: what is rounding, what is not, and what is never taken for agreement."""

import numpy as np
import pytest

from async_grpo.types import (
    CanaryRow,
    PublishReport,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    canary_tokens,
)
from async_grpo.weight_sync.sync_report import (
    canary_complaint,
    canary_differences,
    summarise_sync,
    sync_complaints,
)

VERSION = WeightsVersion(3, 4)


def row(logprobs=(-1.0, -2.0, -3.0), dtype="float32"):
    tokens = np.arange(len(logprobs) + 1, dtype=np.int32)
    return CanaryRow(tokens, np.array(logprobs, dtype=np.float32), dtype)


def scores(*logprobs):
    return np.array(logprobs, dtype=np.float32)


def snapshot(*rows):
    return WeightsSnapshot(VERSION, (), tuple(rows))


def ack(worker_id, *canary, **changes):
    return WeightsAck(worker_id, VERSION, 1.0, 0.0, canary=canary, **changes)


def report(*acks):
    return PublishReport(VERSION, acks, {})


def test_differences_are_those_of_every_token_of_every_row():
    rows = (row(), row((-0.5,)))
    found = (scores(-1.25, -2.0, -2.0), scores(-0.75))
    assert canary_differences(rows, found).tolist() == [0.25, 0.0, 1.0, 0.25]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_score_that_is_not_finite_is_never_agreement(bad):
    assert canary_differences((row(),), (scores(-1.0, bad, -3.0),)).max() == np.inf
    assert "inf nats" in canary_complaint((row(),), (scores(-1.0, bad, -3.0),), dtype="float32")
    assert canary_differences((row((-1.0, bad, -3.0)),), (scores(-1.0, bad, -3.0),)).max() == np.inf


def test_a_worker_that_scored_fewer_rows_or_tokens_is_an_error():
    with pytest.raises(ValueError):
        canary_differences((row(), row()), (scores(-1.0, -2.0, -3.0),))
    with pytest.raises(ValueError):
        canary_differences((row(),), (scores(-1.0, -2.0),))


def test_the_coarser_type_decides_the_bound():
    off = (scores(-1.0, -2.1, -3.0),)
    assert "rounding explains 0.001" in canary_complaint((row(),), off, dtype="float32")
    assert canary_complaint((row(dtype="bfloat16"),), off, dtype="float32") == ""
    assert canary_complaint((row(),), off, dtype="bfloat16") == ""
    far = (scores(-1.0, -3.0, -3.0),)
    assert "rounding explains 0.7" in canary_complaint((row(),), far, dtype="bfloat16")
    near = (scores(-1.0, -2.000005, -3.0),)
    assert canary_complaint((row(),), near, dtype="float32") == ""


def test_the_mean_is_held_to_a_bound_of_its_own():
    tokens = (-1.0, -2.0, -3.0, -4.0)
    one_off = tuple(np.array(tokens) - [3e-5, 0, 0, 0])
    all_off = tuple(np.array(tokens) - 3e-5)
    assert canary_complaint((row(tokens),), (scores(*one_off),), dtype="float32") == ""
    complaint = canary_complaint((row(tokens),), (scores(*all_off),), dtype="float32")
    assert "with the same weights, where rounding explains 0.001 (mean 2e-05)" in complaint
    few_off = (scores(-1.0, -2.0, -3.0, -4.19),)
    assert canary_complaint((row(tokens, "bfloat16"),), few_off, dtype="bfloat16") == ""
    most_off = (scores(-1.1, -2.1, -3.1, -4.1),)
    assert "(mean 0.05)" in canary_complaint((row(tokens),), most_off, dtype="bfloat16")


def test_a_collapsed_policy_is_not_blamed_on_the_worker():
    """The trainer's own log-probabilities tell: no vocabulary has e^20 words to guess among."""
    off = (scores(-300.0, -200.0, -2.0),)
    complaint = canary_complaint((row((-290.0, -200.0, -1.0)),), off, dtype="float32")
    assert "by up to 10 nats" in complaint
    assert "-164 nats a token, worse than guessing: the policy has collapsed" in complaint
    assert "does not serve" not in complaint and "restart it" not in complaint
    healthy = canary_complaint((row((-12.0, -13.0, -12.0)),), off, dtype="float32")
    assert "it does not serve what was sent" in healthy


def test_rows_are_short_prompts_that_predict_at_least_one_token():
    prompts = [np.full(length, 7, np.int32) for length in (1, 2, 0, 1000, 5, 6, 8)]
    assert [len(tokens) for tokens in canary_tokens(prompts)] == [2, 64, 5, 6]
    assert canary_tokens([]) == ()


def test_largest_and_mean_are_over_all_tokens_of_all_workers():
    acks = (ack("a", scores(-1.0, -2.0, -3.5)), ack("b", scores(-2.0, -2.0, -3.0)))
    summary = summarise_sync(snapshot(row()), report(*acks), seconds=2.5)
    assert (summary.canary_max, summary.canary_mean) == (1.0, 0.25)
    assert (summary.sync_batches, summary.sync_seconds) == (4, 2.5)


def test_only_workers_that_replayed_count():
    acks = (ack("renamed"), ack("broken", canary_problem="it timed out"))
    summary = summarise_sync(snapshot(row()), report(*acks), seconds=1.0)
    assert (summary.canary_max, summary.canary_mean) == (None, None)
    assert sync_complaints(snapshot(row()), report(*acks)) == ("worker broken: it timed out",)
    both = report(*acks, ack("c", scores(-1.5, -2.0, -3.0)))
    assert summarise_sync(snapshot(row()), both, seconds=1.0).canary_max == 0.5


def test_a_run_without_rows_has_no_canary_and_no_complaint():
    summary = summarise_sync(snapshot(), report(ack("a")), seconds=1.0)
    assert (summary.canary_max, summary.canary_mean) == (None, None)
    assert sync_complaints(snapshot(), report(ack("a"))) == ()


def test_the_worst_worker_is_named_with_the_weights_and_the_size_of_its_error():
    acks = (ack("fine", scores(-1.0, -2.0, -3.0)), ack("bad", scores(-1.0, -2.0, -6.0)))
    (complaint,) = sync_complaints(snapshot(row()), report(*acks))
    assert complaint.startswith("worker bad: after weights 3.4, ")
    assert "by up to 3 nats (mean 1)" in complaint
