"""A service of the user's: what it is asked and answers, and how its failures are named."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from players import Scripted, make_request, play
from two_turns import TwoTurns

from async_grpo.config.roles import VERIFIER, name_of_class, role_of, service
from async_grpo.config.worker_config import WorkerConfig, check_services
from async_grpo.environments.base import Environment, EpisodeFailed, FailureClass, SingleTurn
from async_grpo.environments.find import grades_itself, make_environment, users_environment
from async_grpo.environments.service import Service, ServiceWorker, make_service
from async_grpo.types import ServiceRequest, Verdict, WorkerInfo
from async_grpo.types.message import packed, unpacked
from async_grpo.util.errors import ConfigError, DeadlineError, LeaseLost, LossCause, WorkerError
from async_grpo.util.user_code import UserCode
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.verifier import load_adapters

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
MINE = """
import asyncio
from async_grpo.environments.service import Service

class Mine(Service):
    capacity = 8
    answer_within_s = 0.2

    async def answer(self, request):
        if request == "wait":
            await asyncio.sleep(60)
        if request == "raise":
            return {}["no such thing"]
        if request == "exit":
            raise SystemExit(3)
        if request == "odd":
            return lambda: 0
        return request

class Broken(Mine):
    def __init__(self):
        raise OSError("no index")

class Plain:
    capacity = 1
    async def answer(self, request): ...
"""
LOST = LeaseLost(LossCause.DIED, "the lease on it has ended")


class Asked(Scripted):
    """A script of turns, and one of answers of the service `index`."""

    def __init__(self, *turns, answers=()):
        super().__init__(*turns)
        self.answers, self.contents = list(answers), []

    async def __call__(self, role, method, request, **where):
        if not role.startswith("service:"):
            return await super().__call__(role, method, request, **where)
        assert method == "answer"
        self.contents.append(unpacked(request.content))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return packed(answer)


class Rewarded(SingleTurn):
    """An asynchronous reward: one turn, which a service grades."""

    async def grade(self, question, episodes, services):
        rewards = [await services["index"]({"text": e.turns[-1].text}) for e in episodes]
        return [Verdict.scored(reward, adapter="index") for reward in rewards]


class Graded(Asked):
    """And whose verifiers find everything right."""

    async def __call__(self, role, method, request, **where):
        if role == VERIFIER:
            return (Verdict.scored(1.0, adapter="mine"),) * len(request.outputs)
        return await super().__call__(role, method, request, **where)


def rewarded(asked, environment=None):
    return asyncio.run(play(environment or Rewarded(), asked, make_request(num_samples=1)))


def test_a_service_is_asked_by_a_reward_and_a_lost_request_is_asked_again():
    asked = Asked([20], answers=[LOST, DeadlineError("late"), 0.25])
    played = rewarded(asked)
    assert [verdict.reward for verdict in played.verdicts] == [0.25]
    assert asked.contents == [{"text": ""}] * 3


@pytest.mark.parametrize(
    ("error", "failure", "said", "num_asked"),
    [
        (WorkerError("it broke"), FailureClass.SERVICE,
         "service index failed 3 times, the last time: it broke", 3),
        (ConfigError("a service must be one of search, got services['index']"),
         FailureClass.ENVIRONMENT, "a service must be one of search, got services['index']", 1),
    ],
)  # fmt: skip
def test_a_service_that_fails_fails_the_group_by_name(error, failure, said, num_asked):
    asked = Asked([20], answers=[error] * 3)
    with pytest.raises(EpisodeFailed) as caught:
        rewarded(asked)
    assert caught.value.failure is failure and said in str(caught.value)
    assert len(asked.contents) == num_asked


def test_what_is_asked_after_a_turn_is_nothing_that_the_model_said():
    class Asks(TwoTurns):
        async def play(self, question, policy, services):
            assert np.array_equal(await services["index"]([1, 2]), [3, 4])
            return await super().play(question, policy, services)

    played = rewarded(Asked([20], answers=[np.array([3, 4])]), Asks())
    assert [len(row.token_ids) for row in played.episodes[0].rows] == [1]


REWARDS = """
from async_grpo.verification.graders import UnscorableError

async def plain(question, episode, services):
    said = await services["index"](episode.text)
    if said == "none":
        raise UnscorableError("no answer")
    return said

async def ranked(question, episodes, services, form=1):
    return [{"reward": r, "format_reward": form} for r in await services["index"](len(episodes))]

ranked.groupwise = True

async def verified(question, episode, services):
    (verdict,) = await services.verify(question, [episode])
    return verdict

def sync(sample):
    return 1.0
"""


def rewarded_by(name, *answers, num_samples=1, arguments=""):
    code = UserCode(f"/a/rewards.py:{name}", REWARDS, arguments)
    asked = Graded(*[[20]] * num_samples, answers=answers)
    request = make_request(num_samples=num_samples, environment=code)
    played = asyncio.run(play(make_environment(code), asked, request))
    return [(each.status, each.reward, each.format_reward) for each in played.verdicts]


def test_an_asynchronous_reward_is_given_each_episode_or_the_group_and_asks_services():
    assert rewarded_by("plain", 0.25) == [("scored", 0.25, None)]
    assert rewarded_by("plain", LOST, {"reward": True}) == [("scored", 1.0, None)]
    assert rewarded_by("plain", "none") == [("unscorable", 0.0, None)]
    ranked = rewarded_by("ranked", [0.5, -1], num_samples=2)
    assert ranked == [("scored", 0.5, 1.0), ("scored", -1.0, 1.0)]
    ranked = rewarded_by("ranked", [0.5, -1], num_samples=2, arguments="form=0.5")
    assert ranked == [("scored", 0.5, 0.5), ("scored", -1.0, 0.5)]
    assert rewarded_by("verified") == [("scored", 1.0, None)]


@pytest.mark.parametrize(
    ("name", "answers", "failure", "said"),
    [
        (
            "plain",
            [WorkerError("it broke")] * 3,
            FailureClass.SERVICE,
            "service index failed 3 tim",
        ),
        (
            "plain",
            [None],
            FailureClass.JUDGE,
            "must return a number, or a dict with 'reward', got N",
        ),
        ("plain", [float("nan")], FailureClass.JUDGE, "a reward must be finite, got nan"),
        ("plain", [{"score": 1}], FailureClass.JUDGE, "a dict with 'reward', got {'score': 1}"),
        ("ranked", [[1.0, 2.0]], FailureClass.JUDGE, "must return 1 verdicts"),
        ("ranked", [7], FailureClass.JUDGE, "at /a/rewards.py:11"),
    ],
)
def test_an_asynchronous_reward_that_fails_is_never_a_zero(name, answers, failure, said):
    with pytest.raises(EpisodeFailed) as caught:
        rewarded_by(name, *answers)
    assert caught.value.failure is failure and said in str(caught.value)


def test_a_reward_is_refused_where_it_cannot_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(REWARDS)
    assert not grades_itself(f"{file}:plain")  # one of its file asks verifiers
    file.write_text(REWARDS.replace("services.verify", "services.never"))
    assert grades_itself(f"{file}:plain")
    with pytest.raises(ConfigError, match=r":ranked must be given arguments that .*, got n=1"):
        users_environment(f"{file}:ranked(n=1)")
    with pytest.raises(ConfigError, match=r"an `async def` reward, got the plain function .*:sync"):
        users_environment(f"{file}:sync")
    with pytest.raises(
        ConfigError, match=r"must be plain functions, got .*:plain', asynchronous: name it by --env"
    ):
        load_adapters(VerifierConfig(reward_names=(f"{file}:plain",)))


def make_worker(name="Mine"):
    code = UserCode(f"/a/mine.py:{name}", MINE)
    stated = WorkerInfo("s0", service("mine"), "", 0, code.name, model_hash=code.sha256)
    return ServiceWorker(lambda: make_service(code), stated=stated)


async def answered(*contents, name="Mine"):
    worker = make_worker(name)
    worker._service = worker._make()  # as `info`, without Ray
    asked = (worker.answer(ServiceRequest(packed(content))) for content in contents)
    return await asyncio.gather(*asked, return_exceptions=True)


@given(st.lists(PLAIN, min_size=1, max_size=4))
def test_every_plain_value_comes_to_the_service_and_back_as_it_was(values):
    contents = [[value] for value in values]  # none of them is a word that it knows
    assert [unpacked(each) for each in asyncio.run(answered(*contents))] == contents


@pytest.mark.parametrize(
    ("request_", "kind", "said"),
    [
        ("wait", DeadlineError, "service mine of /a/mine.py:Mine gave no answer within 0.2 s"),
        ("raise", WorkerError, "raised KeyError('no such thing') at /a/mine.py:13, "),
        ("exit", WorkerError, "raised SystemExit(3) at /a/mine.py:15, "),
        ("odd", WorkerError, "raised "),
    ],
)
def test_what_a_service_does_wrong_is_told_with_its_line_and_others_go_on(request_, kind, said):
    error, other = asyncio.run(answered(request_, "fine"))
    assert type(error) is kind and said in str(error)
    assert unpacked(other) == "fine"


def test_a_caller_that_is_gone_ends_its_requests():
    async def scenario():
        worker = make_worker()
        worker._service = worker._make()
        asking = asyncio.ensure_future(worker.answer(ServiceRequest(packed("wait"))))
        await asyncio.sleep(0)
        await worker.abort_all()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("Broken", WorkerError, r"cannot be made: OSError\('no index'\) at /a/mine.py:\d+"),
        ("Plain", ConfigError, "must be a class derived from Service"),
        ("Missing", ConfigError, "must be a class derived from Service, got None"),
    ],
)
def test_what_is_no_service_is_refused_when_its_worker_starts(name, kind, said):
    with pytest.raises(kind, match=said):
        asyncio.run(make_worker(name).info())


@given(st.from_regex(r"[A-Z][A-Za-z0-9]{0,12}", fullmatch=True))
def test_a_service_without_a_name_has_its_class_name_in_lower_case(name):
    found = name_of_class(f"path/to/file.py:{name}")
    assert found.replace("_", "") == name.lower()
    assert "__" not in found and found.strip("_") == found
    assert name_of_class(f"m:{found}") == found
    assert role_of(service(found)).unit == "requests"


def write(path, *lines, name="Mine"):
    body = "\n    ".join(lines) or "pass"
    path.write_text(f"class {name}:\n    {body}\n")
    return WorkerConfig(mode=f"{path}:Mine")


GOOD = ("capacity = 8", "async def answer(self, request): ...")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (GOOD[1:], "must say in its class how many requests a worker answers at a time, as `cap"),
        (("capacity = 0", GOOD[1]), "got 0: give a whole number of at least 1, in that file"),
        (("capacity = True", GOOD[1]), "got True"),
        (("capacity = 2.5", GOOD[1]), "got 2.5"),
        (("capacity = cores()", GOOD[1]), "got 'cores()'"),
        ((*GOOD, "devices = -1"), "how many devices a worker takes, as `devices = 1`, got -1: "),
        ((*GOOD, "devices = count()"), "got 'count()'"),
        (GOOD[:1], "must have a method `async def answer(self, request)`, and has none: add"),
        ((GOOD[0], "def answer(self, request): ..."), "must have a method `async def answer"),
        (("async def answer(self, request", ), "cannot be imported: SyntaxError"),
    ],
)  # fmt: skip
def test_a_class_that_lacks_something_is_refused_without_being_run(lines, said, tmp_path):
    config = write(tmp_path / "mine.py", *lines)
    with pytest.raises(ConfigError) as caught:
        check_services([config])
    assert said in str(caught.value) and f"{tmp_path}/mine.py" in str(caught.value)


def test_capacity_and_devices_are_those_of_the_class_or_of_its_base(tmp_path):
    config = write(tmp_path / "mine.py", *GOOD, "devices: int = 2")
    assert (config.role, config.capacity, config.num_devices) == ("service:mine", 8, 2)
    (tmp_path / "mine.py").write_text(
        f"class Base:\n    {GOOD[0]}\n    {GOOD[1]}\nclass Mine(Base): ...\n"
    )
    assert (config.capacity, config.num_devices) == (8, 0)
    wider = WorkerConfig(mode=config.mode, max_num_seqs=3, name="other")
    assert (wider.role, wider.capacity) == ("service:other", 3)
    check_services([config, config, wider])


def test_two_classes_of_one_name_are_refused(tmp_path):
    first = write(tmp_path / "one.py", *GOOD)
    second = write(tmp_path / "two.py", *GOOD, "x = 1")
    with pytest.raises(ConfigError, match=r"must be that of every service:mine worker, .*one.py:M"):
        check_services([first, second])
    check_services([first, WorkerConfig(mode=second.mode, name="other")])


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("nowhere.py:Mine", r"--mode must be generation, .*path/to/file.py:Name, got 'nowhere.py"),
        ("no.such.module:Mine", "got 'no.such.module:Mine': No module named 'no'"),
        ("async_grpo.environments.service:Index", "must be a class that its file defines"),
    ],
)  # fmt: skip
def test_a_class_that_is_not_there_is_refused_with_what_may_be_given(mode, said):
    with pytest.raises(ConfigError, match=said):
        check_services([WorkerConfig(mode=mode)])


EXAMPLE = Path(__file__).parents[2] / "examples/calculator_service.py"
NUMBERS = st.integers(0, 999).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        "({0[0]}{0[1]}{0[2]})".format
    ),
)


def of_example(name, base):
    return UserCode.read(f"{EXAMPLE}:{name}", option="--mode", shipped=()).load(base)


@given(EXPRESSIONS.filter(lambda text: len(text) < 100))
def test_the_calculator_of_the_examples_says_what_python_says(text):
    assert asyncio.run(of_example("Calculator", Service)().answer(f"{text}\n")) == str(eval(text))


@pytest.mark.parametrize("text", ["", "2+", "1/0", "import os", "9**9**9"])
def test_the_calculator_answers_a_mistake_in_words(text):
    answer = asyncio.run(of_example("Calculator", Service)().answer(text))
    assert not answer.lstrip("-").isdigit()


@pytest.mark.parametrize(("value", "num_turns"), [("20", 1), ("19", 2)])
def test_who_hits_the_target_of_the_example_has_no_second_turn(value, num_turns, monkeypatch):
    environment = of_example("SecondTry", Environment)
    heard = lambda text, **_: {"input_ids": [len(text)]}  # noqa: E731
    monkeypatch.setitem(environment.play.__globals__, "find_tokenizer", lambda model: heard)
    played = rewarded(Graded([7], [9], answers=[value]), environment())
    (episode,) = played.episodes
    assert [turn.token_ids.tolist() for turn in episode.turns] == [[7], [9]][:num_turns]
    (row,) = episode.rows
    said = len(f"that is {value}\n?")
    assert row.token_ids.tolist() == ([7] if num_turns == 1 else [7, said, 9])
