"""What a learner makes of the ends of steps, and what the run's metrics then tell."""

import json
from types import SimpleNamespace

import pytest
import torch
from learners import make_learner, make_minibatches
from oracle import make_config, sent

from async_grpo.run.loop import train_steps
from async_grpo.run.report import Report
from async_grpo.training.learner import Learner
from async_grpo.training.schedule import Clocks
from async_grpo.types import EndOfStep
from async_grpo.util.errors import UnfitModel
from async_grpo.util.run_folder import METRICS_FILE

GOOD, FILLER, BAD = make_minibatches()


def end(step, *minibatches, num_samples=3, num_tokens=9, aggregation="sample-mean"):
    batch, step_in_batch = divmod(step, 2)
    samples = [sample for minibatch in minibatches for sample in minibatch.samples]
    return EndOfStep(
        batch,
        step_in_batch,
        step_in_batch == 1,
        num_samples,
        num_tokens,
        sent=sent(samples, aggregation=aggregation),
    )


def test_tokens_are_divided_by_and_samples_counted(tmp_path):
    norms, trained = [], sum(sample.num_trained_tokens for sample in GOOD.samples)
    for num_tokens in (trained, 2 * trained):
        learner = make_learner(tmp_path, aggregation="token-mean")
        learner.accumulate(GOOD)
        result = learner.update(
            end(0, GOOD, num_samples=2, num_tokens=num_tokens, aggregation="token-mean")
        )
        assert result.clocks == Clocks(steps=1, samples=2, tokens=num_tokens)
        norms.append(result.grad_norm)
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-6)


def test_an_attention_that_this_device_lacks_is_refused_before_the_model_is_read():
    config = make_config(attention="flash_attention_2", model_name_or_path="nowhere")
    ranks = SimpleNamespace(device=torch.device("cpu"), share=lambda prepare: prepare())
    with pytest.raises(UnfitModel, match=r"flash_attention_2 needs a CUDA device"):
        Learner.build(config, ranks)


class NoExports:
    def count(self, end):
        pass


def test_metrics_tell_which_steps_were_skipped_and_why(tmp_path):
    earlier = tmp_path / "non_finite" / "step_9_rank_0.log"
    earlier.parent.mkdir()
    earlier.touch()
    learner = make_learner(tmp_path, num_training_batches=2)
    nobody = end(2, num_samples=0, num_tokens=0)
    items = [GOOD, end(0, GOOD), BAD, end(1, BAD), FILLER, nobody, FILLER, GOOD, end(3, GOOD)]
    with Report(learner.config) as report:
        train_steps(iter(items), learner, report, NoExports(), after_batch=lambda _: None)

    rows = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]

    def column(name):
        return [row[name] for row in rows]

    assert column("step") == [1, 2, 3, 4]
    assert column("optimizer_steps") == [1, 1, 1, 2]
    assert column("optimizer_samples") == [3, 3, 3, 6]
    assert column("total_samples_accumulated") == [3, 6, 6, 9]
    assert column("skipped_steps_non_finite") == [0, 1, 1, 1]
    assert column("skipped_steps_no_samples") == [0, 0, 1, 1]
    assert [loss is None for loss in column("loss")] == [False, True, True, False]
    kept = [path.name for path in earlier.parent.iterdir()]
    assert kept == ["step_2_rank_3.log"]
