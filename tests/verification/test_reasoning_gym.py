"""Tasks of reasoning-gym by name, and their scorers in the sandbox. Skipped without the package."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.util.errors import ConfigError
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.graders.shipped import SHIPPED
from async_grpo.verification.sandbox import Sandbox

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "sample-data" / "create_reasoning_gym.py"
is_there = importlib.util.find_spec("reasoning_gym") is not None
needs_it = pytest.mark.skipif(not is_there, reason="needs requirements/reasoning-gym.txt")


@pytest.mark.skipif(is_there, reason="the package is installed")
def test_a_machine_without_the_package_is_told_how_to_get_it():
    with pytest.raises(ConfigError, match=r"pip install -r requirements/reasoning-gym\.txt"):
        SHIPPED["reasoning_gym"].prepare()


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """As a user writes them."""
    path = tmp_path_factory.mktemp("gym") / "questions.jsonl"
    command = [sys.executable, SCRIPT, "--output", path, "--num-questions", "2"]
    for task in ("countdown", "chain_sum", "spell_backward"):
        command += ["--task", task]
    subprocess.run(command, check=True, timeout=120)
    return [json.loads(line) for line in path.read_text().splitlines()]


def grade(question, output):
    return SHIPPED["reasoning_gym"](question | {"output": output})["reward"]


@needs_it
@pytest.mark.integration
def test_each_task_is_scored_by_its_own_scorer(questions):
    assert [question["task"] for question in questions[:3]] == [
        "countdown", "chain_sum", "spell_backward",
    ]  # fmt: skip
    for question in questions:
        assert grade(question, question["answer"]) == 1.0
        assert grade(question, "<answer>12345678</answer>") < 0.2
        with pytest.raises(UnscorableError):
            grade(question, question["answer"].replace("<answer>", ""))


@needs_it
@pytest.mark.integration
def test_an_answer_that_is_run_reaches_nothing_outside_the_sandbox(questions, tmp_path):
    """The scorer of countdown evaluates what it reads; a file that it writes must not be there."""
    question, canary = questions[0], tmp_path / "canary"
    tmp_path.chmod(0o777)
    write = f"__import__('pathlib').Path({str(canary)!r}).write_text('run')"
    connect = "__import__('socket').create_connection(('127.0.0.1', 1), 1)"
    hostile = [write, connect, "9**9**9**9", "exit()", "__import__('os').kill(1, 9)"]
    outputs = [f"<answer>{text}</answer>" for text in hostile] + [question["answer"]]

    async def run():
        config = VerifierConfig(
            reward_names=("reasoning_gym",), timeout_s=5.0, search_paths=(str(REPOSITORY),)
        )
        sandbox = Sandbox(config, num_processes=2)
        try:
            await sandbox.start()
            return await sandbox.grade([question | {"output": output} for output in outputs])
        finally:
            await sandbox.close()

    verdicts = asyncio.run(run())
    assert not canary.exists()
    assert verdicts[-1].reward == 1.0
    assert all(verdict.reward < 0.2 for verdict in verdicts[:-1])
