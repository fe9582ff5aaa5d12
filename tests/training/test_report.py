"""What rank 0 says on the console beside its lines of metrics."""

from oracle import make_config

from async_grpo.training.report import Report
from async_grpo.training.schedule import Clocks
from async_grpo.training.step import StepResult
from async_grpo.types import EndOfStep


def test_a_run_whose_rewards_are_all_equal_is_told_of_it_once(tmp_path, caplog):
    sums = {"num_samples": 4, "reward_sum": 4.0, "zero_advantage_samples": 4}
    config = make_config(output_dir=str(tmp_path), trackers="", num_training_batches=9)
    with Report(config) as report:
        for batch in range(9):
            end = EndOfStep(batch, 0, True, num_samples=4, num_tokens=8, sums=sums)
            result = StepResult("", 0.0, 1e-6, 1, Clocks())
            report.step(end, result, denominator=4, waited=0.0)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert "had the same reward (mean 1): nothing is learnt from rewards" in told[0]
