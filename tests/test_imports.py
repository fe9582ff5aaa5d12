"""A torchvision of another build than torch: as if it were not there, in every process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.util.imports import BESIDE_TORCH, STARTUP, startup_variables

REPOSITORY = Path(__file__).parents[1]
LOOK = """
import importlib.util, subprocess, sys
print(importlib.util.find_spec("torchvision") is not None)
"""
HIDE = f"""
import os
from async_grpo.util.imports import hide_misfits
hide_misfits(os.environ)
{LOOK}
sys.stdout.flush()
subprocess.run([sys.executable, "-c", {LOOK!r}], timeout=30, check=True)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts packages of these versions before those that are here."""

    def install(**versions):
        for name, version in versions.items():
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            (tmp_path / f"{name}.py").write_text("raise RuntimeError('no such operator')")
        monkeypatch.syspath_prepend(tmp_path)
        return os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}

    return install


@pytest.mark.parametrize(("version", "is_seen"), [("0.28.0", False), ("0.28.0+cpu", True)])
def test_it_is_hidden_here_and_in_children_only_where_it_does_not_fit(version, is_seen, installed):
    environ = installed(torch="2.13.0+cpu", torchvision=version)
    done = subprocess.run(
        [sys.executable, "-c", HIDE], env=environ, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(is_seen)] * 2


def test_both_lists_of_what_is_hidden_are_one():
    text = Path(STARTUP, "sitecustomize.py").read_text()
    assert all(f'"{name}"' in text for name in BESIDE_TORCH)
    assert text.count('", "') == len(BESIDE_TORCH) - 1


def test_a_process_started_elsewhere_gets_the_folder_once(installed):
    environ = installed(torch="2.13.0+cpu", torchvision="0.28.0")
    found = startup_variables(environ)
    folder = found["PYTHONPATH"].split(os.pathsep)[0]
    assert Path(folder, "sitecustomize.py").is_file()
    assert found["PYTHONPATH"].endswith(environ["PYTHONPATH"])
    assert startup_variables(found) == found


def test_nothing_is_hidden_where_all_fits(installed):
    assert startup_variables(installed(torch="2.13.0", torchvision="0.28.0")) == {}
