"""No text earns what it does not deserve, breaks a grader, holds it up, or is run by it."""

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import effort
import pytest
from corpus import SAMPLE, corpus, fair_output, long_texts

import reward_registry
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.sandbox import Sandbox

REPOSITORY = str(Path(__file__).parents[2])
NAMES = ("mathd", "sympy", "countdown", "math_verify")
ADAPTERS = {name: reward_registry.REWARD_ADAPTERS[name] for name in NAMES}
SIZE = 1_000_000 if effort.FULL else 50_000


def grade(name, output, **columns):
    """What the adapter makes of an output: its reward, or the name of the outcome."""
    try:
        return ADAPTERS[name](SAMPLE | columns | {"output": output})["reward"]
    except UnscorableError:
        return "unscorable"


@pytest.mark.parametrize("name", NAMES)
def test_hostile_texts_earn_nothing_raise_nothing_and_run_nothing(name, tmp_path):
    canary = tmp_path / "canary"
    texts = corpus()
    assert len(texts) > 600
    assert len({text.name for text in texts}) == len(texts)
    earned = {
        text.name: reward
        for text in texts[:: 1 if effort.FULL or name != "math_verify" else 3]  # bare, boxed, ...
        if (reward := grade(name, text.text(size=SIZE, canary=str(canary))))
        not in (0.0, "unscorable")
    }
    assert earned == {}
    assert not canary.exists()
    assert grade(name, fair_output(name)) == 1.0


# Answers of other kinds let a given one be heavier: what they hold, it may hold.
@pytest.mark.parametrize("answer", ["x+1", r"\frac{\sqrt{3}}{2}", "x>5", r"\{1,2\}", "Monday"])
def test_hostile_texts_earn_nothing_whatever_is_expected(answer):
    texts = corpus()[:: 1 if effort.FULL else 23]
    for text in texts:
        for name in ("sympy", "math_verify"):
            output = text.text(size=SIZE)
            assert grade(name, output, answer=answer) in (0.0, "unscorable"), text.name


@pytest.mark.parametrize("name", NAMES)
def test_grading_takes_time_in_proportion_to_the_length(name):
    """Four times the text: 4 where it is linear, 16 where it is quadratic, and seconds then."""
    for text in long_texts():
        short, long = (seconds(name, text.text(size=size)) for size in (25_000, 100_000))
        assert long < 0.3 or long < 8 * short, f"{text.name}: {short:.3f} s, then {long:.3f} s"


def seconds(name, output):
    started = time.process_time()
    grade(name, output)
    return time.process_time() - started


@pytest.mark.parametrize("name", ["mathd", "sympy", "math_verify"])
def test_an_answer_in_the_prompt_is_not_the_models(name):
    prompt = r"Answer like this: \boxed{15}. What is 5 times 3?"
    assert grade(name, prompt, input=prompt) == "unscorable"
    assert grade(name, prompt + r" \boxed{14}", input=prompt) == 0.0
    assert grade(name, prompt + r" \boxed{15}", input=prompt) == 1.0


def test_a_countdown_repeated_from_the_prompt_is_not_the_models():
    prompt = "For 2 9 8 and 19 you say\n8+2+9=19\n"
    assert grade("countdown", prompt, input=prompt) == "unscorable"
    assert grade("countdown", prompt + "8+2+9", input=prompt) == 1.0


@pytest.mark.integration
def test_hostile_texts_leave_a_real_sandbox_whole_and_fair(tmp_path):
    """Every adapter at once: an error of any of them would be the verdict."""
    canary = tmp_path / "canary"
    texts = corpus()[:: 1 if effort.FULL else 20]

    async def run():
        config = VerifierConfig(reward_names=NAMES, timeout_s=5.0, search_paths=(REPOSITORY,))
        sandbox = Sandbox(config, num_processes=2)
        try:
            await sandbox.start()
            outputs = [text.text(canary=str(canary)) for text in texts]
            samples = [SAMPLE | {"output": output} for output in outputs]
            verdicts = await sandbox.grade(samples)
            fair = [SAMPLE | {"output": fair_output(name)} for name in NAMES]
            return verdicts, await sandbox.grade(fair)
        finally:
            await sandbox.close()

    verdicts, fair = asyncio.run(run())
    wrong = [(t.name, v) for t, v in zip(texts, verdicts, strict=True) if v.reward != 0.0]
    assert wrong == []
    assert Counter(verdict.status for verdict in verdicts)["error"] == 0
    assert [verdict.reward for verdict in fair] == [1.0] * len(NAMES)
    assert not canary.exists()


@pytest.mark.integration
def test_an_adapter_that_evaluates_the_text_does_so_far_from_actor_and_credentials(
    tmp_path, monkeypatch
):
    """As third-party scorers do: reasoning-gym's countdown scorer evaluates its answer."""
    (tmp_path / "scorer.py").write_text(
        "def score(sample, **kwargs):\n    return {'reward': float(eval(sample['output']))}\n"
    )
    secrets = ["RAY_AUTH_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"]
    for secret in secrets:
        monkeypatch.setenv(secret, "hush")
    outputs = [
        f"__import__('os').getpid() != {os.getpid()}",
        "'hush' in str(dict(__import__('os').environ))",
        "'hush' in open('/proc/self/environ').read()",
        "__import__('os').system('exit 3') >> 8",
    ]

    async def run():
        name = f"{tmp_path}/scorer.py:score"
        sandbox = Sandbox(VerifierConfig(reward_names=(name,), timeout_s=20.0), num_processes=1)
        try:
            await sandbox.start()
            return await sandbox.grade([SAMPLE | {"output": output} for output in outputs])
        finally:
            await sandbox.close()

    verdicts = asyncio.run(run())
    assert [verdict.reward for verdict in verdicts[:3]] == [1.0, 0.0, 0.0]
    assert verdicts[3].status in ("scored", "error")  # it may run, or be forbidden to
