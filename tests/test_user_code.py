"""Files of users are read once and run from their text; other texts are refused, naming both."""

import hashlib
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.algorithms.find import find_algorithm
from async_grpo.api.running import plan_run
from async_grpo.cli.run_file import as_toml
from async_grpo.config.data_files import DATA_FILES, as_text
from async_grpo.config.option import names_in
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.environments.find import make_environment, users_environment
from async_grpo.environments.service import make_service
from async_grpo.run.preparation import hash_code
from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import (
    UserCode,
    as_name,
    hash_imported,
    run_file,
    split_arguments,
)
from async_grpo.verification.config import verifier_config
from async_grpo.verification.verifier import load_adapters

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from neighbour import NUMBER
@dataclass
class Mine(dict):
    number: int = NUMBER
"""


def test_a_file_may_import_its_neighbours_and_hold_dataclasses(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "neighbour.py").write_text("NUMBER = 7")
    code = UserCode.read(f"{tmp_path}/mine.py:Mine", option="--mine", shipped=())
    assert code.load(dict)().number == 7


def test_a_text_runs_once_in_a_process(tmp_path, capsys):
    path, text = str(tmp_path / "mine.py"), "print('imported')"
    assert run_file(path, text) is run_file(path, text)
    assert capsys.readouterr().out == "imported\n"
    assert run_file(path, text + "#") is not run_file(path, text)


def test_a_path_is_the_same_file_from_any_working_directory(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    code = UserCode.read("mine.py:Mine", option="--mine", shipped=())
    assert code.place == f"{tmp_path}/mine.py"


def test_another_text_is_refused_naming_the_file_and_both_hashes():
    one, other = UserCode("mine.py:Mine", "1"), UserCode("mine.py:Mine", "2")
    one.require_same(one)
    with pytest.raises(ConfigError, match=f"mine.py:Mine must .*{one.sha256}, got {other.sha256}"):
        one.require_same(other)


def test_what_exits_as_it_is_imported_is_refused(tmp_path):
    code = UserCode(f"{tmp_path}/mine.py:Mine", "raise SystemExit(3)")
    with pytest.raises(ConfigError, match=r"mine.py cannot be imported: SystemExit\(3\): correct"):
        code.load(dict)


def test_the_modules_that_a_file_imports_out_of_its_own_folder_are_hashed(tmp_path):
    main = "import os, torch, async_grpo, helper\nfrom lib.deep import f\nfrom . import near\n"
    texts = {
        "mine.py": main, "helper.py": "import second", "second.py": "", "near.py": "",
        "lib/__init__.py": "", "lib/deep.py": "from . import beside", "lib/beside.py": "",
        "unused.py": "", "async_grpo/__init__.py": "",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code = UserCode.read(f"{tmp_path}/mine.py:Mine", option="--mine", shipped=())
    hashes = code.hashes("algorithm")
    named = ("helper.py", "second.py", "near.py", "lib/__init__.py", "lib/deep.py", "lib/beside.py")
    assert hashes.keys() == {"algorithm", *(f"{name} of algorithm" for name in named)}
    assert hashes["algorithm"] == code.sha256
    (tmp_path / "second.py").write_text("1")
    edited = code.hashes("algorithm")
    assert {name for name in hashes if edited[name] != hashes[name]} == {"second.py of algorithm"}


def test_a_file_that_cannot_be_read_as_python_has_no_modules(tmp_path):
    (tmp_path / "mine.py").write_text("def (")
    assert hash_imported(str(tmp_path / "mine.py"), what="it") == {}


TAKES = """
from dataclasses import dataclass
from async_grpo.environments.base import Environment
from async_grpo.environments.service import Service
from async_grpo.algorithms.grpo import Grpo
class Guess(Environment):
    def __init__(self, size: int, *, words: list = (), share: float = 1.0, **more: str):
        self.given = (size, words, share, more)
class Deeper(Guess): ...
class Plain(Environment): ...
class Strict(Environment):
    def __init__(self, *, size: int = 1): self.given = size
@dataclass
class Fields(Environment):
    size: int
    share: float = 0.5
class Bold(Grpo):
    def __init__(self, config, *, push: float):
        self.push = push
        super().__init__(config)
class Index(Service):
    capacity = 2
    def __init__(self, folder: str): self.folder = folder
    async def answer(self, request): return self.folder
def close(sample, *, by: float = 0.1): return {"reward": by}
close.max_reward = 2.0
"""


def make_config(**options):
    return TrainConfig(model_name_or_path="m", data_path="d", output_dir="o", **options)


PLAIN = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@pytest.fixture
def takes(tmp_path):
    (tmp_path / "takes.py").write_text(TAKES)
    return str(tmp_path / "takes.py")


@given(st.dictionaries(st.sampled_from(["size", "words", "to_"]), PLAIN))
def test_any_arguments_survive_files_lists_and_command_lines(given_arguments):
    name = as_name({"path": "my.py:Guess", **given_arguments})
    assert UserCode("", "", split_arguments(name)[1]).values == given_arguments
    assert names_in(f"countdown,{name}") == ("countdown", name)
    [file] = DATA_FILES.records(
        as_text({"type": "t", "path": "p", "environment": name, "rewards": [name, name]})
    )
    assert (file.environment, file.rewards) == (name, (name, name))
    assert tomllib.loads(as_toml({"train": [{"a": given_arguments}]}))["train"]["a"] == (
        given_arguments
    )


def test_arguments_reach_environment_service_and_algorithm(takes):
    environment = users_environment(f"{takes}:Guess(size=4, words=['a'], other='b')")
    assert make_environment(environment).given == (4, ["a"], 1.0, {"other": "b"})
    assert make_environment(users_environment(f"{takes}:Fields(size=2)")).share == 0.5
    mode = f"{takes}:Index(folder='there')"
    worker = WorkerConfig(mode=mode)
    assert worker.role == "service:index"
    assert make_service(worker.terms.code).folder == "there"
    config = make_config(algorithm=f"{takes}:Bold(push=2)")
    assert find_algorithm(config).push == 2
    assert config.options()["algorithm"] == f"{takes}:Bold(push=2)"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("Guess", r"Guess must be given size, got \(\): write \{path = .*size = ...\} in a file"),
        ("Guess(size='4')", "Guess must be given size as int, got size='4': write it as one"),
        ("Guess(size=True)", "must be given size as int, got size=True"),
        ("Deeper(words=[])", "Deeper must be given size"),
        ("Strict(sise=4)", "arguments that it takes, got sise=4: the nearest is size"),
        ("Plain(size=4)", "got size=4: it takes none, remove it"),
        ("Fields(share=1)", "Fields must be given size"),
        ("Fields(size=1, sare=1)", "got sare=1: the nearest is share"),
        ("Guess(4)", r"names with plain values.*got \(4\): an argument has no name"),
        ("Guess(size=open('x'))", "names with plain values"),
        ("Guess(size=)", "names with plain values"),
    ],
)
def test_wrong_arguments_are_refused_by_the_text_alone(takes, asked, told):
    with pytest.raises(ConfigError, match=told):
        users_environment(f"{takes}:{asked}")


def test_wrong_arguments_of_algorithms_services_and_rewards_are_refused(takes):
    for make, told in (
        (lambda: find_algorithm(make_config(algorithm=f"{takes}:Bold")), "must be given push"),
        (lambda: find_algorithm(make_config(algorithm=f"{takes}:Bold(pus=1)")), "nearest is push"),
        (lambda: WorkerConfig(mode=f"{takes}:Index").terms, "must be given folder"),
        (lambda: WorkerConfig(mode="verifier", reward_fns=f"{takes}:close(bye=1)"), "got bye=1"),
        (lambda: WorkerConfig(mode="verifier", reward_fns=f"{takes}:close(by='')"), "as float"),
        (lambda: users_environment("agent:python(size=4)"), "write them as words"),
        (lambda: users_environment("single_turn(size=4)"), "there is none of that name"),
    ):
        with pytest.raises(ConfigError, match=told):
            make()


def test_rewards_have_arguments_and_keep_what_they_declare(takes, tmp_path):
    wide, strict = f"{takes}:close(by=0.5)", f"{takes}:close"
    worker = WorkerConfig(mode="verifier", reward_fns=f"countdown,{wide},{strict}")
    adapters = load_adapters(verifier_config(worker))
    assert adapters[wide]({}) == {"reward": 0.5}
    assert adapters[strict]({}) == {"reward": 0.1}
    assert adapters[wide].max_reward == 2.0


def test_arguments_are_part_of_the_hash_that_a_resume_compares(takes):
    def hashes(**options):
        worker = WorkerConfig(mode="verifier", reward_fns=options.pop("reward", "countdown"))
        return (
            hash_code(make_config(**options)) | verifier_config(worker).rewards(num_cores=1).hashes
        )

    assert len({hashes(algorithm=f"{takes}:Bold(push={n})")["algorithm"] for n in (1, 2)}) == 2
    assert len({hashes(environment=f"{takes}:Guess(size={n})")["environment"] for n in (1, 2)}) == 2
    names = (f"{takes}:close", f"{takes}:close(by=1.0)", f"{takes}:close(by=2.0)")
    assert len({hashes(reward=name)[takes] for name in names}) == 3
    text = hashlib.sha256(TAKES.encode()).hexdigest()
    assert hashes(reward=names[0])[takes] == text


def test_a_run_s_file_and_a_script_name_them_as_tables(takes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = {
        "worker": [
            {"mode": "generation", "model_path": "m",
             "reward_fns": ["countdown", {"path": f"{takes}:close", "by": 0.5}]},
            {"mode": {"path": f"{takes}:Index", "folder": "f, g"}},
            {"mode": "environment"},
        ],
        "train": {"model_name_or_path": "m", "data_path": "d", "output_dir": "run",
                  "algorithm": {"path": f"{takes}:Bold", "push": 2.0}},
    }  # fmt: skip
    played = {"path": f"{takes}:Guess", "size": 4}
    plan, _ = plan_run(tables, environment=played)
    assert plan.train.data.environment == f"{takes}:Guess(size=4)"
    assert plan.train.objective.algorithm == f"{takes}:Bold(push=2.0)"
    assert plan.workers[0].reward_names == ("countdown", f"{takes}:close(by=0.5)")
    assert plan.workers[1].terms.code.values == {"folder": "f, g"}
    for wrong, told in ((played | {"size": "4"}, "size as int"), (played | {"path": 1}, "a path")):
        with pytest.raises(ConfigError, match=told):
            plan_run(tables, environment=wrong)
