"""`async-grpo check --deep`: each step passes on a sound run, and fails on a fault of its own."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from scripted import make_sample

from async_grpo.check import deep
from async_grpo.check.facts import Facts
from async_grpo.cli.check import check
from async_grpo.cli.deep_check import Trials, deep_findings
from async_grpo.types import Minibatch, TrainingPair, WeightsVersion

SAMPLE_DATA = Path(__file__).parents[2] / "sample-data"
MODEL = SAMPLE_DATA / "tiny-countdown"
VERSION = WeightsVersion(0, 0)
PUZZLES = [(a, b, c) for a in range(1, 10) for b in range(1, 10) for c in (2, 7)]
TRAIN = """
[train]
nproc_per_node = 2
model_name_or_path = "{model}"
data_path = "{folder}/data.jsonl"
output_dir = "{folder}/run"
batch_size = 8
max_tokens_per_gpu = 512
learning_rate = 1e-4
"""
WORKER = """
[launch]
num_cpus = 4
[[worker]]
model_path = "{model}"
max_model_len = 128
reward_fns = "{reward}"
"""
SAMPLING = "samples_per_question = 8\nmax_generation_tokens = 32\n"
LUCK = """
import zlib
def luck(sample):
    return float(zlib.crc32(sample["output"].encode() + sample["input"].encode()) % 2)
"""


def pairs(number=6, length=4):
    return [
        TrainingPair(
            np.array([1, 2, 3 + n], np.int32), np.arange(9 + n, 9 + n + length, dtype=np.int32)
        )
        for n in range(number)
    ]


def test_a_line_is_shown_as_loss_and_model_read_it():
    sample = make_sample(VERSION, num_tokens=5)
    problem, table = deep.line_shown(sample, str)
    ids = sample.episode.rows[0].token_ids.tolist()
    assert not problem and f"labels are '{ids}'"[:20] in table
    assert table.splitlines()[1].split() == ["place", "id", "text", "label", "text", "mask"]
    assert [line.split()[-1] for line in table.splitlines()[-2:]] == ["1", "0"]


def test_labels_that_are_not_the_next_id_are_a_problem(monkeypatch):
    def shifted(*args, **options):
        packed = collate(*args, **options)
        return replace(packed, target_ids=packed.target_ids.roll(1))

    collate = deep.collate
    monkeypatch.setattr(deep, "collate", shifted)
    sample = make_sample(VERSION, num_tokens=5)
    token_ids = np.arange(2, 7, dtype=np.int32)
    row = replace(sample.episode.rows[0], token_ids=token_ids)
    sample = replace(sample, episode=replace(sample.episode, rows=(row,)))
    assert "5 labels are not the next id" in deep.line_shown(sample, str)[0]


def test_shuffled_labels_are_all_there_and_none_is_its_own():
    own = pairs()
    mixed = deep.shuffled(own)
    texts = [[tuple(p.completion_token_ids.tolist()) for p in side] for side in (own, mixed)]
    assert sorted(texts[0]) == sorted(texts[1])
    assert all(a != b for a, b in zip(*texts, strict=True))
    prompts = [[p.prompt_token_ids.tolist() for p in side] for side in (own, mixed)]
    assert prompts[0] == prompts[1]


def test_dealt_advantages_are_the_same_ones():
    samples = [replace(make_sample(VERSION, index=n), advantage=float(n)) for n in range(6)]
    minibatches = [Minibatch(0, tuple(samples[:4])), Minibatch(1, tuple(samples[4:]))]
    found = deep.dealt(minibatches, np.random.default_rng(1))
    given = [s.advantage for m in found for s in m.samples]
    assert sorted(given) == [0, 1, 2, 3, 4, 5] and given != sorted(given)
    assert [s.index for m in found for s in m.samples] == [*range(6)]


def checkpoint(folder, weight, moment=0.0):
    folder.mkdir()
    tensors = {"policy.w": torch.tensor([weight]), "optimizer.m": torch.tensor([moment])}
    save_file(tensors, folder / "shard.safetensors")
    return folder


def test_the_distance_of_checkpoints_is_by_the_way_that_they_went(tmp_path):
    start = checkpoint(tmp_path / "start", 0.0)
    end = checkpoint(tmp_path / "end", 2.0)
    assert deep.distance(end, checkpoint(tmp_path / "same", 2.0), start) == 0
    assert deep.distance(end, checkpoint(tmp_path / "near", 1.5), start) == 0.25
    assert 0 < deep.distance(end, checkpoint(tmp_path / "other_moments", 2.0, 1.0), start) < 1e-9
    assert deep.distance(start, end, start) == float("inf")


def test_without_a_model_it_waits():
    [finding] = deep_findings(None, Facts())
    assert finding.level == "waits"


def write(folder, *, is_sft, own_labels=True, reward="countdown"):
    lines, others = [], random.Random(1).sample(PUZZLES, len(PUZZLES))
    for (a, b, c), other in zip(PUZZLES, others, strict=True):
        line = {"input": f"use {a} {b} {c} to make {a + b - c}\n"}
        x, y, z = (a, b, c) if own_labels else other
        answer = {"completion": f"{x}+{y}-{z}={x + y - z}"} if is_sft else {
            "answer": str(a + b - c), "nums": [a, b, c], "target": a + b - c}  # fmt: skip
        lines.append(json.dumps(line | answer) + "\n")
    (folder / "data.jsonl").write_text("".join(lines))
    (folder / "luck.py").write_text(LUCK)
    text = TRAIN + ('algorithm = "sft"\n' if is_sft else SAMPLING)
    text = text if is_sft else WORKER + text
    (folder / "run.toml").write_text(text.format(model=MODEL, folder=folder, reward=reward))
    return str(folder / "run.toml")


def levels(output):
    return re.findall(r"^(ok|error|warning|waits) +deep", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("fault", "red", "said"),
    [
        ("", (), "the same weights, bit for bit"),
        ("no rate", (2, 4), "look at labels and --learning-rate"),
        ("labels of others", (3,), "are prompts and completions those of one line?"),
        ("another rate", (4,), "came to other weights"),
    ],
)
def test_a_supervised_run_passes_and_each_fault_is_found(fault, red, said, tmp_path, monkeypatch):
    given = Trials._with

    def with_fault(trials, name, **options):
        if (fault == "no rate" and name.startswith("batch")) or (
            fault == "another rate" and name == "again"
        ):
            options["learning_rate"] = 0.0 if fault == "no rate" else 2e-4
        return given(trials, name, **options)

    monkeypatch.setattr(Trials, "_with", with_fault)
    file = write(tmp_path, is_sft=True, own_labels=fault != "labels of others")
    result = CliRunner().invoke(check, [file, "--deep", "--trust"])
    expected = ["error" if step in red else "ok" for step in range(5)]
    assert levels(result.output) == expected, result.output
    assert said in result.output and result.exit_code == bool(red)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["", "reward by luck"])
def test_a_run_that_samples_passes_and_a_reward_by_luck_is_found(fault, tmp_path):
    reward = f"{tmp_path}/luck.py:luck" if fault else "countdown"
    file = write(tmp_path, is_sft=False, reward=reward)
    result = CliRunner().invoke(check, [file, "--deep", "--trust"])
    expected = ["ok", "ok", "ok", "error" if fault else "ok", "ok", "ok"]
    assert levels(result.output) == expected, result.output
    assert result.exit_code == bool(fault)
