"""tools/setup_env.sh on machines with devices: what is missing is said before anything is made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
                 "PYTHON": str(programs / "python"), "VENV": str(tmp_path / "venv")},
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


def test_tests_have_an_environment_of_their_own_where_there_are_devices():
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
    assert "\n.venv/bin/python -m pytest" in said("DEVICE_FILES=/nowhere[0-9]*")
