"""The page for a first run, typed: its files are written, its commands run one after another."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks

PAGE = "docs/first-run.md"
RUN_S = 900  # on a busy machine
INSTALLS = "make setup"  # the tests' own environment is there already
SHARED = ("sample-data", "reward_registry.py", "examples")


@pytest.fixture
def checkout(tmp_path):
    for name in SHARED:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "mine").mkdir()
    for block in blocks(PAGE):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    return tmp_path


def type_in(folder, command):
    """Runs a block as typed in a shell whose first programs are those of the tests."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    home = {"HOME": str(folder), "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env={**os.environ, **home},
        capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    return finished.stdout + finished.stderr


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(2400)  # eleven minutes on busy cores
def test_a_first_run_as_the_page_has_it_learns_what_its_reward_asks_for(checkout):
    typed = [b.text for b in blocks(PAGE) if b.language == "bash" and INSTALLS not in b.text]
    said = "".join(type_in(checkout, command) for command in typed)
    lines = (checkout / "runs/mine/evaluation_metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["eval_reward"] for line in lines]
    assert rewards[-1] > rewards[0] + 0.2, said[-4000:]
    assert (checkout / "runs/mine/rollouts.html").exists()
    assert re.search(r"^ok +reward", said, re.MULTILINE), said[:4000]
    python = [b.text for b in blocks(PAGE) if b.language == "python"]
    (checkout / "notebook.py").write_text("\n".join(python[1:]))  # the data is there
    said = type_in(checkout, "python notebook.py")
    assert float(said.splitlines()[-1].split()[0]) > rewards[0] + 0.2, said[-4000:]
