"""Functions of a script on their way to another process, where nothing of the script is known."""

import asyncio
import functools
import json
import subprocess
import sys
import threading

import pytest

from async_grpo.api.rewards import reward_file
from async_grpo.environments.find import (
    asked_services,
    grades_itself,
    make_environment,
    users_environment,
)
from async_grpo.types import Episode
from async_grpo.util.errors import ConfigError
from async_grpo.verification.config import read_sources

BONUS = 0.25
# As a verifier does it, without the folder of this file.
CALL = """
import json, sys
from async_grpo.verification.verifier import load_adapters
from async_grpo.verification.config import VerifierConfig
names = tuple(sys.argv[1:])
found = load_adapters(VerifierConfig(reward_names=names))
print(json.dumps([found[name]({"output": "7", "answer": "7"}) for name in names]))
print(json.dumps([getattr(found[name], "max_reward", 1.0) for name in names]))
"""


def equal(sample, **_):
    return float(sample["output"] == sample["answer"])


def with_bonus(sample):
    return equal(sample) + BONUS


with_bonus.max_reward = 1.25


class Threshold:
    def __init__(self, least):
        self.least = least

    def __call__(self, sample):
        return {"reward": float(int(sample["output"]) >= self.least)}


def called_elsewhere(names, folder):
    done = subprocess.run(
        [sys.executable, "-P", "-c", CALL, *names], cwd=folder, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_functions_closures_and_objects_grade_in_another_process(tmp_path):
    factor = 0.5
    rewards = [equal, with_bonus, lambda sample: factor, Threshold(8), functools.partial(equal)]
    file = reward_file(rewards, folder=tmp_path / "run")
    file.write()
    functions = [name.rpartition(":")[2] for name in file.names]
    assert functions == ["equal", "with_bonus", "reward", "Threshold", "partial"][: len(rewards)]
    found, best = called_elsewhere(file.names, tmp_path)
    assert found == [1.0, 1.25, 0.5, {"reward": 0.0}, 1.0]
    assert best == [1.0, 1.25, 1.0, 1.0, 1.0]  # a function keeps its attributes


def test_two_of_one_name_are_told_apart_and_names_stay_names(tmp_path):
    first, second = (lambda sample: 1.0), (lambda sample: 0.0)
    file = reward_file([first, "countdown", second, "mine.py:grade"], folder=tmp_path)
    functions = [name.removeprefix(f"{file.path}:") for name in file.names]
    assert functions == ["reward", "countdown", "reward_2", "mine.py:grade"]


def test_names_alone_need_no_file(tmp_path):
    file = reward_file("countdown", folder=tmp_path)
    file.write()
    assert (file.names, list(tmp_path.iterdir())) == (("countdown",), [])


def test_the_file_reads_as_the_function_and_is_the_same_for_the_same(tmp_path):
    file = reward_file(equal, folder=tmp_path)
    assert '#         return float(sample["output"] == sample["answer"])' in file.text
    assert reward_file(equal, folder=tmp_path) == file
    assert reward_file(with_bonus, folder=tmp_path).path != file.path
    file.write()
    assert read_sources(file.names, registry="", search_paths=[]) == {str(file.path): file.text}


async def waits(sample):
    return 1.0


async def asks_index(question, episode, services):
    return await services["index"](episode.text) + BONUS


def as_others_have_it(prompts, completions):
    return 1.0


lock, table = threading.Lock(), bytes(17 << 20)


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        (lambda sample: lock and 1.0, "sent to verifier processes, and refers to what cannot be"),
        (lambda sample: len(table), "must refer to at most 16 MiB, got 17.0"),
        (waits, "must take what it grades and asks, got (sample): write def my_reward(question"),
        ([asks_index, equal], "an asynchronous reward must be the only one, got asks_index, equal"),
        (as_others_have_it, "must take one sample, a dict, got (prompts, completions)"),
        ([], "must be a function, or several, got none"),
        ([1.0], "must be a function or a name, got 1.0"),
    ],
)
def test_what_cannot_grade_is_refused_in_a_sentence(rewards, sentence, tmp_path):
    with pytest.raises(ConfigError) as error:
        reward_file(rewards, folder=tmp_path)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_folder_with_a_comma_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="output_dir must hold no comma"):
        reward_file(equal, folder=tmp_path / "a,b")


def test_an_asynchronous_reward_without_a_source_is_known_as_one(tmp_path):
    names = {}
    exec("async def typed(question, episode, services):\n    return 1.0", names)
    file = reward_file(names["typed"], folder=tmp_path)
    file.write()
    assert grades_itself(*file.names)


def test_an_asynchronous_reward_runs_elsewhere_and_its_file_says_what_it_asks(tmp_path):
    file = reward_file(asks_index, folder=tmp_path)
    assert file.asks and not reward_file(equal, folder=tmp_path).asks
    file.write()
    (name,) = file.names
    assert grades_itself(name) and asked_services(name) == ("index",)
    grades = make_environment(users_environment(name)).grade

    class Services:
        def __getitem__(self, name):
            return lambda text: asyncio.sleep(0, len(text))

    episode = Episode((), (), given_text="four")
    (verdict,) = asyncio.run(grades(None, [episode], Services()))
    assert (verdict.reward, verdict.adapter) == (4 + BONUS, "asks_index")
