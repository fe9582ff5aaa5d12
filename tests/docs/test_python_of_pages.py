"""Every Python block of a page runs: those of one page one after another, in one namespace.

A block that shows a part of something, such as a field of a config class, is given what it stands
in. Then `PROMISES` asks of the page's names what the page says of them.
"""

import asyncio
import doctest
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import players
import pytest
import torch
import trained
from oracle import make_config, oracle_logprobs, random_samples
from pages import ROOT, all_blocks, blocks
from two_turns import HIGHER, TwoTurns

import async_grpo
from async_grpo.api.result import Result, Step
from async_grpo.api.running import plan_run
from async_grpo.config.option import POSITIVE, option
from async_grpo.verification.graders.shipped import _said

BLOCKS = all_blocks("python")
PROMISES = {
    "README.md": ["my_reward({'answer': '5', 'output': 'It is 5.'}) == 1.0"],
    "CONTRIBUTING.md": [
        "words({'output': 'a b', 'num_words': 2, 'input': ''}) == {'reward': 1.0}",
        "StepNorm.metrics[-1].name == 'push' and issubclass(StepNorm, Algorithm)",
    ],
    "docs/environments.md": ["CountdownCalculator.tools == (calculate,)"],
    "docs/first-run.md": [
        "largest_first({'output': '9-4+3=8', 'numbers': [4, 9, 3], 'target': 8}) == 1.0",
        "largest_first({'output': '3+9-4=8', 'numbers': [4, 9, 3], 'target': 8}) == 0.3",
        "largest_first({'output': '9-4=5', 'numbers': [4, 9, 3], 'target': 8}) == 0.0",
        "largest_first({'output': 'nine', 'numbers': [4, 9, 3], 'target': 8}) == 0.0",
        "all(largest_first({**q, 'output': q['answer']}) == 1.0 for q in map(json.loads, lines))",
    ],
    "docs/migration.md": [
        "my_reward({'input': '', 'output': 'two words', 'num_words': 2}) == 1.0",
        "my_reward({'input': '', 'output': 'two words', 'num_words': 3}) == 0.0",
    ],
    "docs/python.md": [
        "short_and_equal({'output': '1+2=3'}) == 0.95",
        "plan_run(config, reward=short_and_equal)[0].train.batching.batch_size == 16",
        "[each.mode for each in plan_run(config)[0].workers] == ['generation']",
    ],
    "docs/rewards.md": [
        "my_reward({'answer': '5', 'output': 'It is 5.'})['reward'] == 1.0",
        "my_reward({'answer': '6', 'output': 'It is 5.'})['reward'] == 0.0",
        "shortest([{'answer': '5', 'output': text} for text in ('is 5', '5', '4')]) == [0, 1, 0]",
    ],
}


def supplied(page: str, folder: Path) -> dict[str, Any]:
    """What the blocks of a page stand in."""
    if page != "CONTRIBUTING.md":
        return {"plan_run": plan_run} if page == "docs/python.md" else {}
    (reinforce,) = (b.text for b in BLOCKS if b.page == page and "class Reinforce" in b.text)
    (folder / "my_algorithm.py").write_text(reinforce.replace("Reinforce", "Name"))
    helpers = (players, trained)
    names = {name: value for helper in helpers for name, value in vars(helper).items()}
    names |= {"Any": Any, "_said": _said, "option": option, "POSITIVE": POSITIVE}
    names |= {"make_config": make_config, "HERE": folder, "oracle_loss": oracle_loss}
    names |= {"asyncio": asyncio, "TwoTurns": TwoTurns, "HIGHER": HIGHER}
    samples = random_samples(np.random.default_rng(0), 6, model=trained.make_oracle()[0])
    return {**names, "samples": samples, "self": SimpleNamespace(samples_per_question=2)}


class Planned:
    """What `async_grpo.start` makes, of a run that is read, or refused, and not started."""

    def __init__(self, config, *, reward, on_step=None, **options):
        plan, _ = plan_run(config, reward=reward, **options)
        self.result = Result(plan.folder, ({"avg_reward": 0.0},), ({"eval_reward": 0.0},))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def __iter__(self):
        return (Step({"step": step, "avg_reward": step / 2}, 3) for step in (1, 2, 3))


def oracle_loss(model, samples):
    """Of `Reinforce` there: minus A times the ratio, a mean over tokens, then over samples."""
    losses = []
    for sample in samples:
        (row,) = sample.episode.rows
        if row.loss_mask.any():
            lp = oracle_logprobs(model, sample, temperature=1.0)[row.loss_mask]
            behaviour = torch.from_numpy(row.logprobs[row.loss_mask]).double()
            losses.append(-(sample.advantage * (lp - behaviour).exp()).mean())
    return torch.stack(losses).sum() / len(samples)


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_the_python_of_a_page_runs_and_does_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(
        async_grpo, "train", lambda config, **given: Planned(config, **given).result
    )
    monkeypatch.setattr(async_grpo, "start", Planned)
    (tmp_path / "mine").mkdir()
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    namespace = {"__name__": "page", **supplied(page, tmp_path)}
    for block in (block for block in BLOCKS if block.page == page):
        code = compile(textwrap.dedent(block.text), block.place, "exec")
        exec(code, namespace)
    for name, value in namespace.items():
        if getattr(value, "__module__", "") == "page" and value.__doc__:
            example = doctest.DocTestParser().get_doctest(value.__doc__, namespace, name, page, 0)
            assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
    for promise in PROMISES.get(page, ()):
        assert eval(promise, namespace), promise
    shutil.rmtree(tmp_path / "mine")


def test_the_tool_that_a_page_shows_is_the_example():
    (shown,) = (block.text for block in BLOCKS if "def calculate" in block.text)
    example = (ROOT / "examples/countdown_calculator.py").read_text()
    assert [line for line in shown.splitlines() if line not in example] == []
