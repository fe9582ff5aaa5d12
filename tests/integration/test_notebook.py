"""Cells of a notebook, run by a kernel as Jupyter has it."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from private_cluster import environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]
REWARD = """
import async_grpo

DIGITS = set("0123456789")

def share_of_digits(sample):
    return sum(letter in DIGITS for letter in sample["output"]) / max(len(sample["output"]), 1)
"""
TRAIN = """
steps = []
result = async_grpo.train(
    {{
        "cluster": {{"ray_address": {address!r}, "namespace": "notebook"}},
        "worker": {{"model_path": {model!r}, "max_num_seqs": 16, "num_workers": 1}},
        "train": {{
            "model_name_or_path": {model!r}, "data_path": {questions!r}, "output_dir": "run",
            "num_training_batches": 2, "batch_size": 4, "samples_per_question": 4,
            "max_generation_tokens": 12, "max_tokens_per_gpu": 512, "trackers": "",
        }},
    }},
    reward=[share_of_digits, lambda sample: 0.0],
    on_step=steps.append,
)
print(*steps, sep="\\n")
result
"""
LOOK = """
assert [step["step"] for step in steps] == [1, 2]
assert result.model.name == "samples_32" and result.checkpoint.name == "batch_2"
assert 0 < max(row["avg_reward"] for row in result.history) < 1
assert result.rollouts().stat().st_size > 10_000
result.plot("avg_reward", "loss")
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Runs cells in a folder of their own."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / ".ipython"))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)

    def run(*cells, timeout_s):
        notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
        resources = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=timeout_s, resources=resources).execute()
        return notebook.cells

    return run


def test_a_function_of_a_cell_trains_a_model(kernel, ray_cluster, tiny_model, questions, tmp_path):
    named = TRAIN.format(address=ray_cluster, model=tiny_model, questions=questions)
    *_, trained, looked = kernel(REWARD, named, LOOK, timeout_s=180)
    printed, shown = trained.outputs
    assert "  batch 2/2  " in printed["text"]
    assert shown["data"]["text/plain"].startswith("<Result of run: 2 steps, reward 0.")
    assert "image/png" in looked.outputs[-1]["data"]
    [file] = Path(tmp_path, "run").glob("rewards_*.py")
    assert "def share_of_digits(sample):" in file.read_text()
    assert not os.path.exists(tmp_path / "run" / "logs" / "ray.log")  # it joined a cluster
