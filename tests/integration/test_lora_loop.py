"""Real runs of an adapter on two ranks, sent merged and alone: proved, killed, resumed, gone on."""

import pytest
import torch
from commands import wait_until
from loops import READY_S, Setup, wait_until_registered
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_lifecycle import kill
from tiny_models import load_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]
OPTIONS = {
    "num_training_batches": 10,
    "batch_size": 4,
    "samples_per_question": 4,
    "max_staleness": 0,
    "deterministic": True,
    "kl_coefficient": 0.1,
    "learning_rate": 5e-3,
    "checkpoint_every_batches": 1,
    "max_tokens_per_gpu": 512,
}
NEW = {"lora_rank": 8, "lora_alpha": 24}
WORKERS = {"merged": (), "alone": ("--max-lora-rank", 8, "--max-loras", 4)}


@pytest.fixture(scope="module", params=WORKERS)
def setup(request, ray_cluster, questions, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    setup = Setup(folder, ray_cluster, tiny_model, questions, namespace=request.param,
                  reward="begins_with_a_digit")  # fmt: skip
    flags = ("--dtype", "float32", *WORKERS[request.param])
    with setup.workers("generation", *flags, num_workers=2) as generation:
        wait_until_registered(generation, 2)
        yield setup


def result(setup, name, **options):
    """The tensors of a run's last export."""
    with setup.train(name, **(OPTIONS | options)) as command:
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    (file,) = (setup.folder / name / "hf_format").glob("*/*.safetensors")
    return load_file(file)


def test_a_killed_run_goes_on_to_the_same_bits(setup):
    calm = result(setup, "calm", **NEW)
    with setup.train("killed", **OPTIONS, **NEW) as command:
        wait_until(lambda: len(setup.rows("killed")) >= 3, timeout_s=READY_S)
        kill(command)
        command.wait(timeout_s=10)
    resumed = result(setup, "killed", **NEW)
    assert calm.keys() == resumed.keys()
    assert all(torch.equal(calm[name], resumed[name]) for name in calm)
    assert {row["step"] for row in setup.rows("killed")} == {*range(1, 11)}


def test_engine_and_trainer_agree_after_every_update(setup):
    rows = setup.rows("calm")
    assert len(rows) == OPTIONS["num_training_batches"]
    assert rows[0]["kl"] == 0 < rows[-1]["kl"]
    for row in rows:
        assert row["canary_mean"] <= 5e-6
        assert row["mismatch_max"] < 1e-4


def test_an_adapter_of_peft_s_own_goes_on_and_is_the_reference(setup):
    model = load_model(setup.model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    adapted.save_pretrained(setup.folder / "started")
    result(setup, "went_on", adapter_path=setup.folder / "started")
    rows = setup.rows("went_on")
    assert rows[0]["kl"] == 0 < rows[-1]["kl"]
    assert all(row["canary_mean"] <= 5e-6 for row in rows)
