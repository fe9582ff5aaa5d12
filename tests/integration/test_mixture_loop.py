"""Real runs of mixtures of experts on two ranks, by the engine's choices: killed, and resumed."""

import pytest
import torch
from commands import wait_until
from loops import READY_S, Setup, wait_until_registered
from safetensors.torch import load_file
from test_expert_choices import save_model
from test_lifecycle import kill

pytestmark = [pytest.mark.integration, pytest.mark.slow]
OPTIONS = {
    "num_training_batches": 4,
    "batch_size": 4,
    "samples_per_question": 4,
    "max_staleness": 0,
    "deterministic": True,
    "routing_replay": "on",
    "balance_coefficient": 0.01,
    "learning_rate": 2e-3,
    "checkpoint_every_batches": 1,
    "max_tokens_per_gpu": 512,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": ({"norm_topk_prob": True}, "float32"),
    "qwen3_next": (HYBRID, "bfloat16"),  # in which alone vLLM has its gated deltas on CPUs
}


@pytest.fixture(scope="module", params=FAMILIES)
def setup(request, ray_cluster, questions, tmp_path_factory):
    family, (changes, dtype) = request.param, FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(family)
    (folder / "model").mkdir()
    save_model(family, folder / "model", **changes)
    setup = Setup(folder, ray_cluster, str(folder / "model"), questions, namespace=family,
                  reward="begins_with_a_digit")  # fmt: skip
    with setup.workers("generation", "--dtype", dtype, num_workers=1) as generation:
        wait_until_registered(generation, 1)
        yield setup


def weights(setup, name):
    """The last export of a run."""
    with setup.train(name, **OPTIONS) as command:
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    (folder,) = (setup.folder / name / "hf_format").iterdir()
    return load_file(folder / "model.safetensors")


def test_a_killed_run_goes_on_to_the_same_bits(setup):
    calm = weights(setup, "calm")
    with setup.train("killed", **OPTIONS) as command:
        wait_until(lambda: len(setup.rows("killed")) >= 2, timeout_s=READY_S)
        kill(command)
        command.wait(timeout_s=10)
    resumed = weights(setup, "killed")
    assert calm.keys() == resumed.keys()
    assert all(torch.equal(calm[name], resumed[name]) for name in calm)
    assert {row["step"] for row in setup.rows("killed")} == {1, 2, 3, 4}


@pytest.mark.parametrize("setup", ["qwen3_moe"], indirect=True)  # the other's engine rounds
def test_engine_and_trainer_choose_alike_and_score_alike(setup):
    rows = setup.rows("calm")
    assert len(rows) == OPTIONS["num_training_batches"]
    for row in rows:
        assert row["canary_max"] < 5e-5
        assert row["mismatch_max"] < 1e-4
        assert row["routing_mismatch"] < 0.01 > row["canary_routing_mismatch"]
        assert row["balance_loss"] > 0 < row["router_entropy"]
        assert (row["replay_gain"] is not None) == (row["step"] % 10 == 1)
        assert row["expert_load_max"] >= 1
