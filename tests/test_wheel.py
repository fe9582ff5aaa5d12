"""What is built from this folder, and what it does in an environment without this folder."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PIN = re.compile(r"^([\w.-]+)(?:\[\w+\])?={2,3}(\S+)")


def pins(*files):
    """{package: version} of files of requirements/."""
    texts = [(REPOSITORY / "requirements" / file).read_text() for file in files]
    lines = "\n".join(texts).splitlines()
    return dict(found.groups() for line in lines if (found := PIN.match(line)))


def test_what_the_package_declares_is_what_is_installed_here():
    pinned = pins("base.txt")
    for text in PROJECT["dependencies"]:
        wanted = Requirement(text)
        assert pinned[wanted.name] in wanted.specifier, text


@pytest.mark.parametrize(("extra", "files"), [("cpu", ["cpu.txt", "cpu-nodeps.txt"]),
                                              ("gpu", ["gpu.txt"])])  # fmt: skip
def test_the_extras_are_the_sets_of_requirements(extra, files):
    pinned = pins(*files)
    for text in PROJECT["optional-dependencies"][extra]:
        wanted = Requirement(text)
        assert pinned[wanted.name] in wanted.specifier, text


def run(*command, cwd, timeout_s=120, env=None):
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The files that git knows, or would add."""
    folder = tmp_path_factory.mktemp("source")
    listed = run(
        *("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"), cwd=REPOSITORY
    )
    for file in listed.split("\0")[:-1]:
        if (REPOSITORY / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / file, folder / file)
    return folder


def build(source, folder, *options):
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, *options, cwd=source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build(source, tmp_path_factory.mktemp("dist"), "--wheel")


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of programs of an environment that has the wheel, and sees our dependencies."""
    place = tmp_path_factory.mktemp("env")
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet")
    run(*pip, "--no-index", wheel, cwd=place)
    [packages] = place.glob("lib/python*/site-packages")
    dependencies = Path(pytest.__file__).parents[1]  # added as a path: its own .pth files are not
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return place / "bin"


@pytest.fixture
def elsewhere(tmp_path):
    """(an empty folder, variables without a way back to this one)."""
    return tmp_path, {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


@pytest.mark.integration
def test_the_wheel_has_package_examples_and_models_and_no_test(wheel):
    names = names_in(wheel)
    for part in ("examples/quickstart.toml", "sample-data/create_count_down.py"):
        assert f"async_grpo/share/{part}" in names
    models = {"tiny-chat", "tiny-countdown", "tiny-teacher", "tiny-teacher-mul"}
    found = {name.split("/")[3] for name in names if name.endswith("model.safetensors")}
    assert found == models
    assert {"async_grpo/util/startup/sitecustomize.py", "reward_registry.py"} <= names
    assert {"async_grpo/viewing/page/page.js", "async_grpo/cli/main.py"} <= names
    assert "async_grpo/verification/jail-x86_64.bpf" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if ".dist-info" not in top} == {"async_grpo", "reward_registry.py"}


@pytest.mark.integration
@pytest.mark.slow
def test_the_source_archive_has_all_that_git_knows_and_makes_the_same_wheel(
    source, wheel, tmp_path
):
    known = {str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()}
    known = {name for name in known if not name.startswith(("build/", "async_grpo.egg-info/"))}
    again = build(source, tmp_path)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    kept_out = (".gitignore", ".dockerignore", "benchmarks/results/")
    assert {name for name in known - held if not name.startswith(kept_out)} == set()
    assert names_in(again) == names_in(wheel)


@pytest.mark.integration
def test_the_wheel_s_commands_work_in_an_empty_folder(installed, elsewhere):
    folder, environ = elsewhere
    code = "import async_grpo, reward_registry; print(async_grpo.__file__)"
    place = run(installed / "python", "-c", code, cwd=folder, env=environ)
    assert Path(place).is_relative_to(installed.parent)
    told = run(installed / "async-grpo", "quickstart", "--help", cwd=folder, env=environ)
    assert "Train a tiny model on countdown puzzles" in told
    command = ("launch", "examples/quickstart.toml", "--dry-run")
    plan = run(installed / "async-grpo", *command, cwd=folder, env=environ)
    assert f'model_path = "{installed.parent}' in plan
    assert list(folder.iterdir()) == []


@pytest.mark.integration
@pytest.mark.slow
def test_the_quick_start_of_the_wheel_trains_in_an_empty_folder(installed, elsewhere):
    folder, environ = elsewhere
    environ = {**environ, "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "token"}
    command = ("quickstart", "--num-batches", "2", "--num-ranks", "1")
    said = run(installed / "async-grpo", *command, cwd=folder, env=environ, timeout_s=300)
    assert "held-out accuracy" in said
    [model] = Path(folder, "runs/quickstart/hf_format").iterdir()
    assert model.name == "samples_512"
