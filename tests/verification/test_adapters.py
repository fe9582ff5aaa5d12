import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.util.errors import ConfigError
from async_grpo.verification.config import VerifierConfig, read_sources, verifier_config
from async_grpo.verification.verifier import load_adapters

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _restore_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def load(*names, registry="reward_registry", folder=REPOSITORY, sources=None):
    config = VerifierConfig(
        reward_names=names, registry=registry, search_paths=(str(folder),), sources=sources or {}
    )
    return load_adapters(config)


def test_the_shipped_registry_has_the_four_rewards_and_they_grade():
    adapters = load("mathd", "sympy", "countdown", "math_verify")
    sample = {"output": r"\boxed{8-2+9}", "answer": "15", "numbers": [2, 8, 9], "target": 15}
    assert adapters["countdown"](sample) == {"reward": 1.0, "format_reward": 1.0}
    sample = {"output": r"\boxed{\frac{\sqrt{8}}{2}}", "answer": r"\sqrt{2}"}
    assert adapters["mathd"](sample) == {"reward": 0.0}
    assert adapters["sympy"](sample) == {"reward": 1.0}
    assert adapters["math_verify"](sample) == {"reward": 1.0}


def test_a_function_of_a_file_is_found_and_its_neighbours_are_importable(tmp_path):
    folder = tmp_path / "rewards"
    folder.mkdir()
    (folder / "neighbour_of_mine.py").write_text("VALUE = 0.25\n")
    (folder / "mine.py").write_text(
        "from neighbour_of_mine import VALUE\ndef grade(sample, **kwargs):\n"
        "    return {'reward': VALUE}\n"
    )
    name = "rewards/mine.py:grade"
    assert load(name, folder=tmp_path)[name]({}) == {"reward": 0.25}
    absolute = f"{folder / 'mine.py'}:grade"
    assert load(absolute)[absolute]({}) == {"reward": 0.25}


def test_an_adapter_that_cannot_work_here_says_so_when_it_is_loaded(tmp_path):
    (tmp_path / "picky.py").write_text(
        "from async_grpo.util.errors import ConfigError\ndef grade(sample, **kwargs): ...\n"
        "def prepare(): raise ConfigError('it needs a moon')\ngrade.prepare = prepare\n"
    )
    with pytest.raises(ConfigError, match="it needs a moon"):
        load(f"{tmp_path / 'picky.py'}:grade")


def test_a_function_of_a_module_is_found(tmp_path):
    (tmp_path / "my_module_of_rewards.py").write_text("def grade(sample): return {'reward': 1}\n")
    name = "my_module_of_rewards:grade"
    assert load(name, folder=tmp_path)[name]({}) == {"reward": 1}


def test_a_registry_may_be_a_file_with_plain_string_keys(tmp_path):
    (tmp_path / "rewards.py").write_text("REWARD_ADAPTERS = {'mine': lambda sample: None}\n")
    assert list(load("mine", registry="rewards.py", folder=tmp_path)) == ["mine"]


@pytest.mark.parametrize(
    ("name", "registry"),
    [
        ("kept/file.py:grade", ""),
        ("kept.module:grade", ""),
        ("grade", "kept/table.py"),
        ("grade", "kept.registry"),
    ],
)
def test_what_the_dispatcher_has_read_grades_although_the_file_was_edited(
    name, registry, tmp_path, monkeypatch
):
    monkeypatch.delitem(sys.modules, "kept", raising=False)
    (tmp_path / "kept").mkdir()
    paths = [tmp_path / "kept" / f"{stem}.py" for stem in ("file", "module", "table", "registry")]
    text = "def grade(sample): return {}\nREWARD_ADAPTERS = {{'grade': grade}}\n"
    for path in paths:
        path.write_text(text.format(0.25))
    sources = read_sources([name], registry=registry, search_paths=[str(tmp_path)])
    assert list(sources) == [registry or name.partition(":")[0]]
    for path in paths:
        path.write_text(text.format(0.5))
    adapters = load(name, registry=registry, folder=tmp_path, sources=sources)
    assert adapters[name]({}) == 0.25


def test_a_dispatcher_hashes_what_its_rewards_import_out_of_their_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").write_text("import helper\ndef grade(sample): return 1.0")
    (tmp_path / "own" / "helper.py").write_text("")
    worker = WorkerConfig(mode="verifier", reward_fns="own/mine.py:grade")
    hashes = verifier_config(worker).rewards(num_cores=1).hashes
    assert list(hashes) == ["own/mine.py", "helper.py of own/mine.py"]


@pytest.mark.parametrize(
    ("name", "registry", "told"),
    [
        (
            "nope",
            "reward_registry",
            "choose from code_execution, countdown, majority, math_verify, mathd, reasoning_gym",
        ),
        ("nope.py:grade", "reward_registry", "must name a file that exists, got 'nope.py'"),
        ("no_such_module:grade", "reward_registry", "ModuleNotFoundError"),
        ("math:nope", "reward_registry", "math has no 'nope'"),
        ("mathd", "no_such_registry", "--reward-registry names 'no_such_registry'"),
        ("mathd", "math", "must hold a dict REWARD_ADAPTERS"),
        ("broken.py:grade", "reward_registry", "SyntaxError"),
        ("leaving.py:grade", "reward_registry", "SystemExit"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_sentence(tmp_path, name, registry, told):
    (tmp_path / "broken.py").write_text("def grade(:\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)\n")
    sys.path.insert(0, str(REPOSITORY))
    with pytest.raises(ConfigError) as caught:
        load(name, registry=registry, folder=tmp_path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


HEAVY = {"numpy", "torch", "sympy", "threading", "logging", "asyncio"}
LOAD = """
import sys
from async_grpo.verification import config, fork_server, verifier

names, paths = (sys.argv[1],), (sys.argv[2],)
adapters, greeting = verifier.load(config.VerifierConfig(reward_names=names, search_paths=paths))
assert greeting["shipped"], greeting
print(*sys.modules)
"""


@pytest.mark.parametrize("name", ["countdown", "mathd"])
def test_a_server_of_light_rewards_holds_no_library_that_each_fork_would_pay_for(name):
    command = [sys.executable, "-c", LOAD, name, str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert HEAVY & set(done.stdout.split()) == set()
