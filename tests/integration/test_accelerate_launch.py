"""Ranks that `accelerate launch` has started, as a user types it, on CPUs."""

import json

import pytest
import yaml
from commands import Command
from private_cluster import environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]  # half a minute
TIMEOUT_S = 240


def losses_of(run):
    lines = (run / "training_metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_accelerate_s_ranks_train_as_our_own_by_the_options_of_its_file(tmp_path):
    pairs, file = tmp_path / "pairs.jsonl", tmp_path / "accelerate.yaml"
    rows = [(a, b) for a in range(2, 9) for b in range(2, 8)]
    pairs.write_text("".join(
        json.dumps({"input": f"use {a} {b} 3 to make {a + b - 3}\n", "completion": f"{a}+{b}-3"})
        + "\n" for a, b in rows
    ))  # fmt: skip
    keys = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    whole = {"distributed_type": "FSDP", "mixed_precision": "no", "num_machines": 1}
    file.write_text(yaml.safe_dump(whole | {"num_processes": 2, "fsdp_config": keys}))
    ours = (
        *("trainer_core.py", "--algorithm", "sft", "--data-path", pairs, "--trackers", ""),
        *("--model-name-or-path", "sample-data/tiny-countdown", "--batch-size", 8),
        *("--num-training-batches", 2, "--max-tokens-per-gpu", 1024),
    )
    launch = ("-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", file)
    asked = ("--use_fsdp", "--num_processes", 2, "--num_machines", 1, "--main_process_port", 0)
    one, other = tmp_path / "accelerate", tmp_path / "ours"
    env = environment(CUDA_VISIBLE_DEVICES="")
    with (
        Command(*launch, *asked, *ours, "--output-dir", one, env=env) as theirs,
        Command(*ours, "--nproc-per-node", 2, "--output-dir", other, env=env) as own,
    ):
        for command in (theirs, own):
            assert command.wait(timeout_s=TIMEOUT_S) == 0, command.err
        assert "--fsdp-sharding-strategy SHARD_GRAD_OP" in theirs.out
        assert "2 ranks" in theirs.out
    options = json.loads((one / "training_params.json").read_text())
    assert (options["fsdp_sharding_strategy"], options["mixed_precision"]) == (
        "SHARD_GRAD_OP",
        "no",
    )
    assert losses_of(one) == losses_of(other)
    assert len(losses_of(one)) == 2
