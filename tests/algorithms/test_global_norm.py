"""Advantages over a whole gradient step: its rounds wait for all of its groups."""

import numpy as np
import pytest
from script import Script
from scripted import run
from scripted_run import Run, make_config, split_steps
from trained import HERE

from async_grpo.util.errors import WorkerError


def train(name="global_norm.py:GlobalNorm", *, failing=frozenset(), **options):
    """(script, [(samples sent to any rank, end) of each gradient step])."""
    config = make_config(algorithm=str(HERE / name), max_staleness=1, **options)
    script = Script(config=config, failing=failing, seed=5)
    items = run(Run(script).train())
    steps = [
        ([s for minibatches, _ in parts for m in minibatches for s in m.samples], parts[0][1])
        for parts in zip(*map(split_steps, items), strict=True)
    ]
    return script, steps


@pytest.mark.parametrize("failing", [frozenset(), frozenset({1, 6, 7})])
@pytest.mark.parametrize("step_size", [4, 2])
def test_every_sample_is_normalised_by_its_whole_step_without_what_failed(failing, step_size):
    script, steps = train(failing=failing, train_minibatch_size=step_size)
    assert len(steps) == 12 // step_size
    for number, (samples, end) in enumerate(steps):
        ordinals = {*range(number * step_size, (number + 1) * step_size)} - failing
        rewards = {(o, i): r for o in ordinals for i, r in enumerate(script.rewards(o))}
        assert end.num_samples == len(rewards)
        values = np.array(list(rewards.values()))
        for sample in samples:
            reward = rewards.pop((sample.ordinal, sample.index))
            expected = (reward - values.mean()) / (values.std() + 1e-4)
            assert sample.advantage == pytest.approx(expected, rel=1e-12)
        assert all(reward == values.mean() for reward in rewards.values())  # contributes zero


def test_an_error_of_the_user_s_step_ends_the_run_with_it(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from async_grpo.algorithms.grpo import Grpo\n"
        "class Broken(Grpo):\n"
        "    def finish_step(self, groups):\n"
        "        raise ZeroDivisionError('of the user')\n"
    )
    with pytest.raises((WorkerError, ZeroDivisionError), match="of the user"):
        train(tmp_path / "broken.py:Broken")
