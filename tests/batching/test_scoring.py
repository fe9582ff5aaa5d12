"""Which samples the reference sees, and when."""

import numpy as np
import pytest
from scripted import make_completion, make_verdict
from staged import OLDEST, SCORES, Stage, Worker


def asked_of_reference(**objective):
    """(the group, lengths of the outputs that the reference saw or None)."""
    verdicts = (make_verdict(1.0),) * 2
    cut = make_completion(OLDEST, num_tokens=5, finish_reason="length")
    generation = Worker((make_completion(OLDEST, num_tokens=4), cut))
    worker = Worker(SCORES)
    worker.logprobs = answer_by_length(worker)
    finished = Stage(generation, Worker(verdicts), worker, **objective).run()
    lengths = [len(ids) for request in worker.requests for ids in request.output_token_ids]
    return finished, lengths


def answer_by_length(worker):
    async def logprobs(request):
        worker.requests.append(request)
        return tuple(np.full(len(ids), -1.0, np.float32) for ids in request.output_token_ids)

    return logprobs


def test_only_samples_that_will_be_trained_are_scored_for_the_loss():
    finished, lengths = asked_of_reference(kl_coefficient=0.1, mask_truncated_samples=True)
    assert lengths == [4]
    scored = ["reference" in sample.scores for sample in finished.samples]
    assert scored == [True, False]


def test_with_k1_every_sample_is_scored_before_its_advantage():
    k1 = {"kl_coefficient": 0.1, "kl_estimator": "k1", "mask_truncated_samples": True}
    finished, lengths = asked_of_reference(**k1)
    assert lengths == [4, 5]
    assert [s.kl_penalty for s in finished.samples] == pytest.approx([0.2, 0.25])
    assert [s.advantage for s in finished.samples] == pytest.approx([0.025, -0.025])
    assert [s.verdict.reward for s in finished.samples] == [1.0, 1.0]
    assert [s.num_trained_tokens for s in finished.samples] == [4, 0]


def test_a_group_that_is_replaced_is_never_scored_for_the_loss():
    finished, lengths = asked_of_reference(kl_coefficient=0.1, dynamic_sampling=1)
    assert (finished.is_replaced, lengths) == (True, [])
