"""Agents that know the address of a server only, as processes, played against scripted turns."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gateways import RENDERER, TOKENIZER, said
from players import Scripted, make_request, make_turn, play

from async_grpo.bridges import agent
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.environments.causes import Cause
from async_grpo.environments.find import make_environment, users_environment
from async_grpo.types import Question, Verdict
from async_grpo.util.errors import ConfigError

pytestmark = pytest.mark.integration

BEGIN = """
import json, os, sys, time, urllib.error, urllib.request
def ask(path, **asked):
    url = os.environ["OPENAI_BASE_URL"] + path
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
    try:
        return json.load(urllib.request.urlopen(request))["choices"][0]
    except urllib.error.HTTPError as error:
        sys.exit(json.load(error)["error"]["message"])
def chat(messages, **asked):
    return ask("/chat/completions", model="gpt-4o", messages=messages, **asked)["message"]
task = [{"role": "user", "content": sys.stdin.read()}]
"""


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch):
    monkeypatch.setattr(agent, "find_tokenizer", lambda model: TOKENIZER)


@pytest.fixture
def played(tmp_path):
    """Play the text of an agent on turns."""

    def played(text, *turns, kind=agent.AgentEnvironment, **fields):
        path = tmp_path / "the_agent.py"
        path.write_text(BEGIN + text)
        made = Graded(kind, [sys.executable, str(path)])
        question = Question([5], "2+3?", "5", {})
        fields = {"num_samples": 1, "max_row_tokens": 2000, "question": question} | fields
        ask = Scripted(*turns)
        group = asyncio.run(play(made, ask, make_request(**fields), RENDERER))
        return group.episodes, ask.asked

    return played


class Graded:
    """An environment whose episodes nobody grades."""

    def __init__(self, kind, command):
        self._environment = kind(command)
        self.play = self._environment.play

    async def grade(self, question, episodes, services):
        return [Verdict.scored(1.0) for _ in episodes]


def test_a_conversation_of_an_agent_is_one_row_of_what_was_sampled(played):
    (episode,), asked = played(
        """
first = chat(task)
chat([*task, first, {"role": "user", "content": "Sure?"}], temperature=0.1, top_p=0.3)
""",
        said("four"),
        said("five"),
    )
    (row,) = episode.rows
    assert row.token_ids[row.loss_mask].tolist() == [*said("four"), *said("five")]
    (first, _, _), (second, sampling, _) = asked
    assert TOKENIZER.decode(first).count("2+3?") == 1
    assert second[: len(first) + len(said("four"))] == [*first, *said("four")]
    assert sampling.temperature == 1.0


def test_a_history_that_was_rewritten_begins_another_row(played):
    (episode,), _ = played('chat(task); chat([{"role": "user", "content": "x"}])',
                           said("a"), said("b"))  # fmt: skip
    assert [row.token_ids.tolist() for row in episode.rows] == [said("a"), said("b")]


def test_a_stop_string_ends_the_turn_that_is_trained(played):
    text = 'assert chat(task, stop="STOP")["content"] == "one "'
    (episode,), _ = played(text, said("one STOP two"))
    assert episode.rows[0].token_ids.tolist() == said("one STOP", ends=False)
    assert len(episode.rows[0].logprobs) == episode.rows[0].weights_versions[-1].stop
    assert episode.text == "one "


def test_completions_of_ids_and_texts_train_too(played):
    text = 'assert ask("/completions", prompt=[1, 2], max_tokens=4)["text"] == "ab"'
    (episode,), ((history, sampling, _),) = played(text, said("ab"))
    assert (history, sampling.max_tokens) == ([1, 2], 4)
    assert episode.rows[0].token_ids.tolist() == said("ab")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sys.exit('no idea')", "exited with 1: no idea"),
        ("print('bye')", "ended without a request to OPENAI_BASE_URL: bye"),
        ("chat(task); 1 / 0", "ZeroDivisionError"),
        ("chat([{'role': 'king'}])", "exited with 1: a message must be an object with a role"),
        ("os.environ['OPENAI_API_KEY'] = 'x'; chat(task)", "must carry the token of its session"),
        ("raise OSError('deep ' * 99 + 'at the end')", "exited with 1: .*deep at the end$"),
    ],
)
def test_an_agent_that_fails_is_an_error_and_no_reward(played, text, sentence):
    with pytest.raises(EpisodeFailed, match=sentence) as caught:
        played(text, *[said("a")] * 3)
    assert caught.value.failure == FailureClass.ENVIRONMENT


LOOK = """
tool = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}
first = chat(task, tools=[tool])
json.loads(first["tool_calls"][0]["function"]["arguments"])["place"]
"""


def called(name, arguments):
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    return said(f"<tool_call>\n{call}\n</tool_call>")


@pytest.mark.parametrize(
    "turn",
    [
        make_turn(said("a long story", ends=False), finish_reason="length"),
        make_turn(called("look", '{"where": "here"}')),
        make_turn(called("look", '{"place": 7')),
        make_turn(called("jump", '{"place": "here"}')),
    ],
    ids=["cut", "arguments", "no JSON", "no tool"],
)
def test_an_agent_that_crashes_on_what_the_model_wrote_ends_its_episode_which_is_graded(
    played, turn
):
    (episode,), asked = played(LOOK + "1 / 0", turn, said("a"))
    assert len(asked) == len(episode.turns) == 1
    assert episode.rows[0].token_ids.tolist() == turn.token_ids.tolist()


SCHEMA = {"type": "object", "required": ["x"]}
IN_JSON = f"""
form = {{"type": "json_schema", "json_schema": {{"name": "a", "schema": {SCHEMA}}}}}
json.loads(chat(task, response_format=form)["content"])["x"]
"""


@pytest.mark.parametrize("answer", ["five", '{"y": 1}'])
def test_an_answer_that_is_not_the_json_asked_for_is_sampled_freely_and_the_model_s(played, answer):
    (episode,), ((_, sampling, _),) = played(IN_JSON, said(answer))
    assert sampling.grammar == ""
    assert episode.rows[0].loss_mask.all()


def test_with_constrained_outputs_json_is_sampled_under_its_grammar_and_not_trained(played):
    (episode,), ((_, sampling, _),) = played(IN_JSON, said('{"x": 1}'), constrains=True)
    tag = json.loads(json.loads(sampling.grammar)["structural_tag"])
    assert tag["format"]["json_schema"] == SCHEMA
    assert not episode.rows[0].loss_mask.any()
    assert episode.is_forced


@pytest.mark.parametrize(
    "choice", ["'required'", "{'type': 'function', 'function': {'name': 'look'}}"]
)
def test_a_required_tool_is_sampled_freely_and_its_lack_is_the_model_s_doing(played, choice):
    text = LOOK.replace("[tool])", f"[tool], tool_choice={choice})") + "1 / 0"
    assert choice in text
    (episode,), ((_, sampling, _),) = played(text, said("five"), constrains=True)
    assert sampling.grammar == ""
    assert episode.rows[0].loss_mask.all()


def test_an_agent_may_say_that_it_was_the_model_s_doing(played):
    (episode,), _ = played("chat(task); sys.exit(os.EX_DATAERR)", said("a"))
    assert len(episode.turns) == 1


@pytest.mark.parametrize(
    ("text", "turn", "cause"),
    [
        (LOOK + "1 / 0", called("look", '{"place": "here"}'), Cause.UNKNOWN),
        ("chat(task); os.kill(os.getpid(), 9)", said("a"), Cause.STATE),
    ],
)
def test_an_agent_that_fails_otherwise_is_not_begun_again_alone(played, text, turn, cause):
    with pytest.raises(EpisodeFailed) as caught:
        played(text, turn, said("b"), said("c"))
    assert caught.value.cause is cause and not caught.value.again


def test_an_engine_that_fails_is_none_of_the_agent_s(played):
    lost = EpisodeFailed(FailureClass.ENGINE, "lost")
    with pytest.raises(EpisodeFailed) as caught:
        played("chat(task); time.sleep(60)", *[lost] * 9)
    assert caught.value.failure == FailureClass.ENGINE


def test_an_episode_without_room_ends_with_what_there_is(played):
    text = """
while True:
    task.append(chat(task)); task.append({"role": "user", "content": "Go on."})
"""
    (episode,), _ = played(text, *[said("a")] * 9, max_row_tokens=160)
    assert (episode.is_cut, episode.finish_reason) == (True, "length")
    assert 1 <= len(episode.turns) < 9


def test_a_text_that_cannot_fit_a_row_ends_the_episode_before_it_is_read(played):
    text = """
chat(task)
chat([{"role": "user", "content": "a " * 100_000}])
"""
    (episode,), asked = played(text, *[said("a")] * 2, max_row_tokens=160)
    assert (len(episode.turns), episode.is_cut, len(asked)) == (1, True, 1)


def test_an_agent_has_so_many_turns(played):
    class Two(agent.AgentEnvironment):
        max_turns = 2

    (episode,), _ = played("while True: chat(task)", *[said("a")] * 9, kind=Two)
    assert (len(episode.turns), episode.is_cut) == (2, True)


def test_an_agent_that_asks_for_nothing_is_killed_with_all_that_it_has_started(played, tmp_path):
    text = f"""
import subprocess
child = subprocess.Popen(["sleep", "60"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
chat(task)
time.sleep(60)
"""
    with pytest.raises(EpisodeFailed, match="asked for nothing") as caught:
        played(text, *[said("a")] * 3, idle_timeout_s=1.5)
    assert caught.value.failure == FailureClass.DEADLINE
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_what_an_agent_leaves_in_the_background_ends_with_it(played, tmp_path):
    text = f"""
import subprocess
child = subprocess.Popen(["sleep", "60"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
chat(task)
"""
    began = time.monotonic()
    played(text, said("a"))
    assert time.monotonic() - began < 30
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_an_agent_ends_with_all_that_it_has_started_when_its_worker_is_killed(tmp_path):
    pids = tmp_path / "pids"
    agent = f"sleep 60 & echo $$ $! > {pids}; wait"
    run = f"run_process(['sh', '-c', {agent!r}], text='', variables=dict(os.environ))"
    worker = "import asyncio, os\nfrom async_grpo.bridges.agent import run_process\nasyncio.run"
    process = subprocess.Popen([sys.executable, "-c", f"{worker}({run})"])
    deadline = time.monotonic() + 30
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


def is_gone(pid):
    """Whether it has ended, be it reaped or not."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_command_is_named_with_whole_paths_and_the_texts_of_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("print(1)")
    code = users_environment("agent:python mine.py --once")
    assert code.name == f"agent:python {tmp_path}/mine.py --once"
    assert make_environment(code).command == ["python", f"{tmp_path}/mine.py", "--once"]
    (tmp_path / "mine.py").write_text("print(2)")
    with pytest.raises(ConfigError, match="must be the same everywhere"):
        make_environment(code)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("agent:", 'must be followed by words as in "agent:python'),
        ("agent: 'a", "No closing quotation"),
    ],
)
def test_what_is_no_command_is_refused(name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        users_environment(name)


def test_a_proxy_of_the_user_s_does_not_stand_between(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "internal")
    found = agent.agent_variables(agent.Address("http://127.0.0.1:1", "a", "t"))
    assert found["OPENAI_BASE_URL"] == "http://127.0.0.1:1/s/a/v1"
    assert found["NO_PROXY"] == "internal,127.0.0.1"
    assert found["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
