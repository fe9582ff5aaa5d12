"""Tasks that a bridge plays: a stand-in always, `verifiers` itself where its Python is named."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from gateways import RENDERER, TOKEN, TOKENIZER, listening, said
from gateways import Scripted as ServedUser
from players import Scripted, make_request, make_turn, play

from async_grpo.bridges import agent, verifiers, verifiers_bridge
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.environments.causes import Cause
from async_grpo.environments.find import grades_itself, make_environment, users_environment
from async_grpo.types import Question

HERE = Path(__file__).parent
PYTHON = os.environ.get("ASYNC_GRPO_VERIFIERS_PYTHON", "")
pytestmark = pytest.mark.integration
needs_verifiers = pytest.mark.skipif(
    not PYTHON, reason="ASYNC_GRPO_VERIFIERS_PYTHON must name the Python where verifiers is"
)


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch):
    monkeypatch.setattr(agent, "find_tokenizer", lambda model: TOKENIZER)
    monkeypatch.setenv("PYTHONPATH", str(HERE / "tasksets"))
    monkeypatch.setenv("USER_TOKEN", TOKEN)


def played(environment, tasks, *turns, failures=None, **fields):
    """Groups of one, each of a task, one after another; those that fail go to `failures`."""
    ask = Scripted(*turns)

    async def run():
        groups = []
        for task in tasks:
            question = Question([5], task["prompt"], None, {"task": task})
            given = {"num_samples": 1, "max_row_tokens": 4000, "question": question}
            given["idle_timeout_s"] = 300.0
            try:
                request = make_request(**given | fields)
                groups.append(await play(environment, ask, request, RENDERER))
            except EpisodeFailed as error:
                if failures is None:
                    raise
                failures.append(error)
        return groups

    groups = asyncio.run(run())
    return [(group.episodes[0], group.verdicts[0]) for group in groups], ask.asked


@pytest.fixture
def stand_in(monkeypatch):
    """The environment of the stand-in."""
    monkeypatch.setattr(verifiers_bridge, "__file__", str(HERE / "stand_in_bridge.py"))
    return verifiers.VerifiersEnvironment([sys.executable])


TASK = {"prompt": "2+3?", "answer": "5"}


def test_an_episode_is_what_was_sampled_and_its_reward_the_bridges(stand_in):
    turns = [said("4"), said("5"), said("6")]
    (first, second), asked = played(stand_in, [TASK | {"turns": 2}, TASK], *turns)
    (row,) = first[0].rows
    assert row.token_ids[row.loss_mask].tolist() == [*said("4"), *said("5")]
    assert asked[1][0][: len(asked[0][0]) + len(said("4"))] == [*asked[0][0], *said("4")]
    assert [(v.status, v.reward) for _, v in (first, second)] == [("scored", 1), ("scored", 0)]
    assert stand_in._bridge._running is not None


def test_a_bridge_that_dies_takes_the_state_of_its_episodes_along_and_is_started_again(
    stand_in, tmp_path
):
    task = TASK | {"grave": str(tmp_path / "died"), "deaths": 1}
    failures = []
    ((_, verdict),), _ = played(stand_in, [task] * 2, said("4"), said("5"), failures=failures)
    (failed,) = failures
    assert "ended with 3: " in str(failed) and "no memory left" in str(failed)
    assert (failed.failure, failed.cause) == (FailureClass.ENVIRONMENT, Cause.STATE)
    assert not failed.again  # it is the whole group's to be played again
    assert verdict.reward == 1


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        ("SandboxError", FailureClass.ENVIRONMENT),
        ("ToolsetError", FailureClass.TOOL),
        ("TaskError", FailureClass.JUDGE),
        ("TimeoutError", FailureClass.DEADLINE),
        ("HarnessError", FailureClass.ENVIRONMENT),
    ],
)
def test_an_error_of_verifiers_is_one_of_ours_and_no_reward(stand_in, error, failure):
    with pytest.raises(EpisodeFailed, match=f"{error}: as was asked") as caught:
        played(stand_in, [TASK | {"error": error}], *[said("5")] * 3)
    assert caught.value.failure == failure
    is_state = error in ("SandboxError", "ToolsetError")
    assert caught.value.cause is (Cause.STATE if is_state else Cause.UNKNOWN)


def test_a_harness_that_ends_on_a_cut_turn_ends_the_episode_without_an_answer(stand_in):
    turn = make_turn(said("a long sto", ends=False), finish_reason="length")
    ((_, verdict),), _ = played(stand_in, [TASK | {"error": "HarnessError"}], turn)
    assert (verdict.status, verdict.reason) == ("unscorable", "the last turn is cut")


def test_an_engine_that_fails_is_none_of_the_bridges(stand_in):
    lost = EpisodeFailed(FailureClass.ENGINE, "lost")
    with pytest.raises(EpisodeFailed) as caught:
        played(stand_in, [TASK], *[lost] * 9)
    assert caught.value.failure == FailureClass.ENGINE


def test_an_episode_without_room_is_cut_and_has_no_answer(stand_in):
    ((episode, verdict),), _ = played(
        stand_in, [TASK | {"turns": 9}], *[said("4")] * 9, max_row_tokens=160
    )
    assert (episode.is_cut, verdict.status, verdict.reward) == (True, "unscorable", 0.0)


def test_an_episode_that_asks_for_nothing_is_given_up(stand_in):
    with pytest.raises(EpisodeFailed, match="asked for nothing") as caught:
        played(stand_in, [TASK | {"sleeps": 60}], *[said("4")] * 3, idle_timeout_s=1.5)
    assert caught.value.failure == FailureClass.DEADLINE


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["/no/python"], "bridge /no/python .* cannot be started"),
        ([sys.executable, "vf_sums"], "ended with 1: .*No module named"),
    ],
)
def test_a_python_without_verifiers_is_named(words, sentence):
    with pytest.raises(EpisodeFailed, match=sentence):
        played(verifiers.VerifiersEnvironment(words), [TASK])


def test_a_question_without_a_task_is_told_how_to_get_one(stand_in):
    question = Question([5], "2+3?", None, {"input": "2+3?"})
    request = make_request(question=question)
    with pytest.raises(EpisodeFailed, match="write the data with"):
        asyncio.run(play(stand_in, Scripted(), request, RENDERER))


def test_the_name_holds_python_and_options(tmp_path):
    config = tmp_path / "env.toml"
    config.write_text("[env]\n")
    code = users_environment(f"verifiers:{sys.executable} @ {config}")
    assert (grades_itself(code.name), code.text) == (True, "[env]\n")
    assert isinstance(make_environment(code), verifiers.VerifiersEnvironment)


LOCAL = ["--env.agent.runtime.type", "subprocess"]
TOOLS = ["--env.taskset.task.has-tools"]
CALL = '<tool_call>\n{"name": "calculator_add", "arguments": {"a": 0, "b": 3}}\n</tool_call>'


def tasks_of(tmp_path, options):
    """As a user writes them."""
    path = tmp_path / "tasks.jsonl"
    command = [PYTHON, "-P", verifiers_bridge.__file__, "tasks", path, *options, "-n", "2"]
    subprocess.run(command, check=True, timeout=300)
    return [json.loads(line)["task"] for line in path.read_text().splitlines()]


@needs_verifiers
def test_verifiers_plays_and_grades_single_turns(tmp_path):
    options = ["vf_sums", *LOCAL]
    environment = verifiers.VerifiersEnvironment([PYTHON, *options])
    turns = [said("It is 3"), said("I do not know")]
    groups, asked = played(environment, tasks_of(tmp_path, options), *turns)
    assert [verdict.reward for _, verdict in groups] == [1.0, 0.0]
    for (episode, _), (history, _, _), turn in zip(groups, asked, turns, strict=True):
        (row,) = episode.rows
        assert (row.prompt_token_ids.tolist(), row.token_ids.tolist()) == (history, turn)


@needs_verifiers
def test_an_error_of_a_task_of_verifiers_is_no_reward(tmp_path):
    options = ["vf_sums", *LOCAL, "--env.taskset.task.has-error"]
    environment = verifiers.VerifiersEnvironment([PYTHON, *options])
    with pytest.raises(EpisodeFailed, match="RuntimeError: no reward") as caught:
        played(environment, [TASK], *[said("5")] * 3)
    assert caught.value.failure == FailureClass.JUDGE


@needs_verifiers
def test_tools_of_verifiers_are_called_and_their_results_only_read(tmp_path):
    """By its own harness, which fetches its packages at the first episode."""
    options = ["vf_sums", *LOCAL, "--env.agent.harness.id", "null", *TOOLS]
    environment = verifiers.VerifiersEnvironment([PYTHON, *options])
    turns = [said(CALL), said("It is 3")]
    task, _ = tasks_of(tmp_path, options)
    ((episode, verdict),), (first, second) = played(environment, [task], *turns)
    (row,) = episode.rows
    assert verdict.reward == 1.0
    assert "calculator_add" in TOKENIZER.decode(first[0])
    assert row.token_ids[row.loss_mask].tolist() == [*turns[0], *turns[1]]
    assert [*row.prompt_token_ids, *row.token_ids] == [*second[0], *turns[1]]
    assert "<tool_response>\n3\n</tool_response>" in TOKENIZER.decode(second[0])


USER = ["--env.id", "user-sim", "--env.assistant.harness.id", "null"]
USER += ["--env.user.runtime.type", "subprocess", "--env.assistant.runtime.type", "subprocess"]


@needs_verifiers
def test_a_simulated_user_of_verifiers_is_no_row(tmp_path):
    model = ServedUser(said("What is 0+3?"), said("###DONE###"))
    with listening(model) as url:
        options = ["vf_sums", *USER, "--env.user.model", "policy"]
        options += ["--env.user.client.type", "eval", "--env.user.client.base-url", f"{url}/v1"]
        options += ["--env.user.client.api-key-var", "USER_TOKEN"]
        environment = verifiers.VerifiersEnvironment([PYTHON, *options])
        task, _ = tasks_of(tmp_path, options)
        ((episode, verdict),), _ = played(environment, [task], said("It is 3"))
    assert verdict.reward == 1.0
    assert [row.token_ids.tolist() for row in episode.rows] == [said("It is 3")]
    assert "What is 0+3?" in TOKENIZER.decode(episode.rows[0].prompt_token_ids)
    assert len(model.asked) == 2


@needs_verifiers
def test_an_agent_that_is_not_trained_needs_a_model_of_its_own():
    environment = verifiers.VerifiersEnvironment([PYTHON, "vf_sums", *USER])
    with pytest.raises(EpisodeFailed, match="must have a model of its own: give"):
        played(environment, [TASK], *[said("5")] * 3)


def made_trace(*rewards, trainable=True, errors=()):
    agent = SimpleNamespace(trainable=trainable)
    by_name = {str(i): r and SimpleNamespace(value=r) for i, r in enumerate(rewards)}
    return SimpleNamespace(agent=agent, rewards=by_name, errors=errors)


@pytest.mark.parametrize(
    ("traces", "is_ok", "found"),
    [
        ([made_trace(0.5, 0.25), made_trace(1.0, trainable=False)], True, {"reward": 0.75}),
        ([made_trace(None)], True, "TaskError"),
        ([made_trace(float("nan"))], True, "TaskError"),
        ([made_trace(1.0), made_trace(1.0)], True, "EnvError"),
        (
            [made_trace(1.0, errors=[SimpleNamespace(type="SandboxError", message="")])],
            False,
            "SandboxError",
        ),
    ],
)
def test_the_reward_is_the_trained_agents_or_there_is_none(traces, is_ok, found):
    episode = SimpleNamespace(ok=is_ok, traces=traces, errors=[])
    told = verifiers_bridge.outcome(episode)
    assert told == found or told["errors"][-1][0] == found
