"""Four machines that people have: each run fits by its bill, or is refused before it starts.

1.5B and 7B on one device, 7B on eight, 32B on two machines, 70B on two and on four, of 80 GB
devices that are not here. The GiB are those of the second reading of the device paths, from what a
rank holds by itself; CUDA's context is 1 GiB more.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from planning.runs import asked

from async_grpo.check.finding import Finding
from async_grpo.cli.assignment import placed, placed_on
from async_grpo.cli.check import findings_of
from async_grpo.cli.launch_file import run_of
from async_grpo.cli.main import main
from async_grpo.cli.memory import check_memory, devices_in
from async_grpo.devices.bill import GIB, pinned_bytes, trainer_bill
from async_grpo.devices.inventory import Device, Inventory
from async_grpo.planning.asked import PUBLISHED, Split, shape_of_config
from async_grpo.planning.bills import bills_of, check_hosts, rank_bill_of, training_of
from async_grpo.util.errors import ConfigError

SMALL, SEVEN, LARGE, HUGE = (
    "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B", "meta-llama/Llama-3.1-70B",
)  # fmt: skip
OF_DEVICES = ("deepscaler", "lora_7b", "one_gpu", "qwen_7b")
H100 = Device(0, "GPU-0", "NVIDIA H100 80GB HBM3", 81_559)  # as nvidia-smi tells


def here(num_devices):
    devices = tuple(replace(H100, index=i, uuid=f"GPU-{i}") for i in range(num_devices))
    return Inventory(devices, "580.95.05")


def written(folder, model, *, ranks=1, engines=1, parts=1, reference="", **options):
    """The file of a run of `model`; `reference`: lines of a reference worker, with a KL penalty."""
    options = {"max_tokens_per_gpu": 8192} | options
    kl = f'[[worker]]\nmode = "logprob"\nmodel_path = "{model}"\n{reference}\n' if reference else ""
    train = "".join(f"{name} = {value!r}\n".replace("'", '"') for name, value in options.items())
    file = folder / "run.toml"
    file.write_text(
        f'[[worker]]\nmodel_path = "{model}"\nnum_workers = {engines}\nmax_model_len = 8192\n'
        f"tensor_parallel_size = {parts}\nmax_num_seqs = 128\n{kl}"
        f'[train]\nmodel_name_or_path = "{model}"\ndata_path = "d.jsonl"\n'
        f'output_dir = "{folder}/run"\nnproc_per_node = {ranks}\n'
        f"kl_coefficient = {0.1 if reference else 0.0}\nmax_generation_tokens = 4096\n{train}"
    )
    return str(file)


@pytest.mark.parametrize(
    ("model", "ranks", "tokens", "offload", "gib"),
    [
        ("qwen2.5-1.5b", 1, 16_384, "none", 29.6),
        ("qwen2.5-1.5b", 1, 8192, "none", 28.0),
        ("qwen2.5-7b", 1, 8192, "none", 124.5),  # the 113.5 of its states, and what it computes
        ("qwen2.5-32b", 8, 8192, "none", 81.0),
        ("qwen2.5-32b", 8, 8192, "optimizer", 50.5),
        ("qwen2.5-32b", 16, 8192, "none", 50.5),
        ("llama-3.1-70b", 8, 8192, "optimizer", 98.0),
        ("llama-3.1-70b", 8, 8192, "parameters", 32.2),
        ("llama-3.1-70b", 24, 8192, "none", 76.1),
        ("llama-3.1-70b", 16, 8192, "optimizer", 65.1),
    ],
)
def test_a_rank_holds_what_the_reading_said(model, ranks, tokens, offload, gib):
    run = asked(
        model, devices="64", max_tokens_per_gpu=tokens, offload=offload,
        activation_checkpointing="on",
    )  # fmt: skip
    bill = trainer_bill(run.model, training_of(run, ranks))
    assert round(bill.total / GIB, 1) == gib
    assert rank_bill_of(run, ranks).total == bill.total + GIB
    names = ("master weights", "gradients", "AdamW's moments")
    states = sum(line.num_bytes for line in bill.lines if line.name in names) / GIB
    assert states == pytest.approx(16 * run.model.num_parameters / ranks / GIB, rel=1e-6)
    assert round(states, 1) == 113.5 or model != "qwen2.5-7b"


def test_on_one_device_each_has_what_its_bill_needs_and_the_cache_what_is_left(tmp_path):
    """A third of 79.6 GiB each was 28.7 for a rank that needs 30.6."""
    file = written(
        tmp_path, SMALL, reference="max_tokens_per_gpu = 16384", max_tokens_per_gpu=16_384
    )
    run = placed(run_of(file, ()), here(1), host_bytes=128 * GIB)
    with pytest.raises(ConfigError, match=r"this machine has 24\.0 GiB and the run needs about 27"):
        placed(run_of(file, ()), here(1), host_bytes=24 * GIB)
    rank, (engine, reference) = run.train.memory.gpus_per_rank, run.workers
    assert rank * 79.6 > 1.1 * 30.6 > 0.36 * 79.6
    assert reference.gpus_per_worker * 79.6 > 6.4
    assert engine.gpus_per_worker > 0.35
    assert 0.88 <= rank + engine.gpus_per_worker + reference.gpus_per_worker <= 0.9


def run_for(file, devices):
    """Place the run of a file on imagined devices, and ask its bills."""
    fleet = devices_in(devices)
    run = placed_on(run_of(file, ()), fleet)
    check_memory(run, fleet)
    return run


@pytest.mark.parametrize(
    ("devices", "model", "said", "options"),
    [
        ("1", SEVEN, r"needs 125\.5 GiB and 45% of H100 has 33\.5 GiB.*\(--lora-rank 16\)", {}),
        (
            "8,8", LARGE, r"needs 82\.0 GiB and H100 has 74\.5.* too much: give "
            r"--offload optimizer, or train an adapter .*, or train on 10 ranks",
            {"ranks": 8, "engines": 4, "parts": 2},
        ),
        (
            "8,8", HUGE, r"needs 99\.0 GiB and H100 has .* give --offload parameters",
            {"ranks": 8, "engines": 2, "parts": 4, "offload": "optimizer"},
        ),
        (
            "8,8,8,8", HUGE, r"needs 77\.1 GiB and H100 has .* train on 26 ranks or more",
            {"ranks": 24, "engines": 2, "parts": 4},
        ),
        (
            "8,8,8,8", HUGE, "reference worker does not fit: .* shard it over --scorer-ranks 4",
            {"ranks": 16, "engines": 2, "parts": 4, "offload": "optimizer", "reference": "\n"},
        ),
    ],
    ids=["7B on one", "32B on 8 ranks", "70B on 8", "70B on 24", "70B with a reference"],
)  # fmt: skip
def test_what_cannot_fit_is_refused_by_every_command(devices, model, said, options, tmp_path):
    file = written(tmp_path, model, **options)
    with pytest.raises(ConfigError, match=said):
        run_for(file, devices)
    done = CliRunner().invoke(main, ["launch", file, "--plan-for", devices])
    assert done.exit_code == 1 and "--unchecked-memory starts it all the same" in done.output
    found = findings_of([file], tries_rewards=False, plan_for=devices)
    [finding] = [each for each in found if each.subject == "devices"]
    assert finding == Finding("error", "devices", done.stderr.removeprefix("error: ").strip())
    assert not (tmp_path / "run").exists()
    unchecked = findings_of([file, "--unchecked-memory"], tries_rewards=False, plan_for=devices)
    assert [each.level for each in unchecked if each.subject == "devices"] == ["ok"]


@pytest.mark.parametrize(
    ("devices", "model", "options"),
    [
        ("8", SEVEN, {"ranks": 4, "engines": 4, "max_tokens_per_gpu": 16_384}),
        ("8,8", LARGE, {"ranks": 8, "engines": 4, "parts": 2, "offload": "optimizer"}),
        ("8,8,8,8", HUGE, {"ranks": 16, "engines": 4, "parts": 4, "offload": "optimizer"}),
        ("8,8,8,8xH200", HUGE, {"ranks": 24, "engines": 2, "parts": 4}),
    ],
    ids=["7B on eight", "32B on sixteen", "70B on 16 ranks", "70B on H200"],
)
def test_what_fits_is_placed(devices, model, options, tmp_path):
    run = run_for(written(tmp_path, model, **options), devices)
    assert run.num_ranks == options["ranks"]


def test_a_supervised_run_is_asked_too(tmp_path):
    file = tmp_path / "run.toml"
    options = f'data_path = "d.jsonl"\noutput_dir = "{tmp_path}/run"\nalgorithm = "sft"\n'
    file.write_text(f'[train]\nmodel_name_or_path = "{SEVEN}"\n{options}')
    with pytest.raises(ConfigError, match=r"does not fit on 1 rank: .*train an adapter"):
        placed(run_of(str(file), ()), here(1), host_bytes=1024 * GIB)
    assert placed(run_of(str(file), ["--offload", "parameters"]), here(1), host_bytes=1024 * GIB)
    with pytest.raises(ConfigError, match=r"this machine has 64\.0 GiB and the run needs about 2"):
        placed(run_of(str(file), ["--offload", "parameters"]), here(1), host_bytes=64 * GIB)


@pytest.mark.parametrize(
    "file",
    [file for file in sorted(Path("examples").glob("*.toml")) if file.stem not in OF_DEVICES],
)
def test_no_laptop_of_4_gib_is_refused_what_is_made_for_laptops(file):
    placed(run_of(str(file), ()), Inventory(), host_bytes=4 * GIB)


def test_launch_refuses_on_this_machine_within_seconds_and_makes_nothing(tmp_path):
    file = written(tmp_path, HUGE, ranks=8, engines=8)  # 2.5 TiB, were it on CPUs
    command = [sys.executable, "-m", "async_grpo.cli.main", "launch", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("; --unchecked-memory starts it all the same")
    assert not (tmp_path / "run").exists()
    done = CliRunner().invoke(main, ["launch", file, "--dry-run", "--unchecked-memory"])
    assert done.exit_code == 0 and "unchecked_memory = true" in done.output


def test_a_host_holds_copies_for_checkpoints_and_what_is_offloaded_or_is_refused():
    run = asked(
        "qwen2.5-32b", devices="8,8", tensor_parallel=2, max_tokens_per_gpu=8192,
        offload="optimizer", activation_checkpointing="on",
    )  # fmt: skip
    split = Split(4, 8)
    rank = bills_of(run, split)[0]
    own = {each.name: 8 * each.num_bytes / GIB for each in rank.bill.lines if each.on_host}
    assert own["AdamW's moments"] + own["copies that AdamW steps on"] == pytest.approx(488, abs=1)
    assert own["copies for a checkpoint"] == pytest.approx(366, abs=1)
    check_hosts(run, split)  # of a machine whose memory is not known
    check_hosts(replace(run, host_bytes=1000 * GIB), split)  # the ranks', with the store
    with pytest.raises(ConfigError, match=r"a machine has 900\.0 GiB and the run needs about 9"):
        check_hosts(replace(run, host_bytes=900 * GIB), split)
    unsaved = run.with_train(checkpoint_every_batches=0)
    check_hosts(replace(unsaved, host_bytes=700 * GIB), split)


def test_the_host_of_ranks_in_turns_holds_engines_too(tmp_path):
    run = asked("qwen2.5-7b", devices="8", max_tokens_per_gpu=8192, colocated=True, max_staleness=0)
    with pytest.raises(ConfigError, match=r"most of it for 8 x generation worker \(staged wei"):
        check_hosts(replace(run, host_bytes=256 * GIB), Split(8, 8))


def test_pinned_blocks_are_the_next_powers_of_two():
    """As the reading found of 7B on 4 ranks: 67.9 MB of an MLP's matrix are 134 MB."""
    model = shape_of_config(PUBLISHED["qwen2.5-7b"], who="7B")
    whole = 4 * model.num_parameters / 4
    assert pinned_bytes(model, 4) / whole == pytest.approx(1.9, abs=0.1)
    aligned = replace(
        model, hidden=4096, intermediate=16_384, query_width=4096, key_width=1024,
        vocab_size=131_072, root_parameters=2 * 131_072 * 4096,
    )  # fmt: skip
    of_layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 16_384
    assert pinned_bytes(aligned, 4) == 28 * of_layer + 2 * 131_072 * 4096
    run = asked("qwen2.5-7b", offload="parameters")
    rounding = [line for line in rank_bill_of(run, 4).lines if line.name.startswith("rounding")]
    assert rounding[0].num_bytes == 2 * (pinned_bytes(model, 4) - model.num_parameters)
