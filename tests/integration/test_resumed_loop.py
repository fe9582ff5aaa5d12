"""Runs that are killed and resumed by the same command line, beside one that is left alone.

Real trainers, checkpoints, registries, batchers; scripted completions. Each life is a process that
SIGKILLs itself in the middle of something (resumed_loop.py).
"""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from effort import FULL
from oracle import relative_difference
from private_cluster import environment
from resumed_loop import Ask, Death, Failure, Life
from safetensors.torch import load_file
from scripted_services import TIMEOUT_S, Story, scripted_services
from stories import GROUP, NAMESPACE, World, lines, make_story
from test_scripted_loop import without_timing

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

EXACT = {
    "deterministic": True,
    "max_staleness": 0,
    "batch_size": 6,
    "train_minibatch_size": 3,
    "num_training_batches": 5,
    "checkpoint_every_batches": 2,
    "ratio_mode": "decoupled",
    "importance_correction": "truncate",
    "correction_high": 1.2,
    "kl_coefficient": 0.05,
    "num_batches_per_ref_model_update": 3,  # moved at the checkpoint after batch 4, not after 2
    "dynamic_sampling": 1,
    "learning_rate": 1e-2,
    "lr_scheduler": "cosine",
    "min_samples_per_checkpoint": 30,
    "data_order": "window",
    "data_window": 3,
}
LAGGING = EXACT | {
    "data_order": "index",
    "deterministic": False,
    "max_staleness": 1,
    "checkpoint_every_batches": 3,
    "num_batches_per_ref_model_update": 2,
}
TWICE = EXACT | {"num_passes": 2, "num_training_batches": 3, "checkpoint_every_batches": 1}
SUPERVISED = {
    "algorithm": "sft",
    "batch_size": 4,
    "train_minibatch_size": 2,
    "num_training_batches": 4,
    "checkpoint_every_batches": 1,
    "eval_every_batches": 2,
    "learning_rate": 1e-2,
    "data_order": "window",
    "data_window": 3,
}
CONTROLLED = LAGGING | {
    "num_batches_per_ref_model_update": 1_000_000,
    "lr_scheduler": "constant",
    "num_training_batches": 8,
}
ASKED = pytest.mark.skipif(not FULL, reason="four more lives: make test-all has them")
STEP = "async_grpo.training.learner:Learner.update"
MINIBATCH = "async_grpo.training.learner:Learner.accumulate"
PUBLISH = "async_grpo.run.sampled_data:SampledData.publish"
SHARDS = "async_grpo.checkpoint.saving:save_tensors"
RENAME = "async_grpo.checkpoint.disk:rename"
WRITE_SHARD = "torch.distributed.checkpoint.filesystem:FileSystem.create_stream"


@pytest.fixture(scope="module")
def world(ray_cluster, questions, tmp_path_factory):
    return World(tmp_path_factory.mktemp("resumed"), ray_cluster, questions)


@pytest.fixture(scope="module")
def lives(world):
    exact = make_story(world, "alone", EXACT)
    lagging = lagged(make_story(world, "lagging", LAGGING))
    pairs = world.folder / "pairs.jsonl"
    lines = [{"input": f"{n}+2=", "completion": str(n + 2)} for n in range(6)]
    lines += [{"text": f"{n}+2={n + 2}"} for n in range(6, 8)]
    pairs.write_text("\n".join(map(json.dumps, lines)))

    def of(name, story=exact, options=EXACT):
        return replace(story, config=world.config(name, options))

    def supervised(name):
        paths = {"data_path": str(pairs), "eval_data_path": str(pairs)}
        config = world.config(name, SUPERVISED).but(**paths)
        return Story(config=config, groups={})

    killed, resized, full = of("killed"), of("resized"), of("full")
    late = of("late", lagging, LAGGING)
    return [
        Life(exact),
        Life(killed, death=Death(MINIBATCH, 3)),  # nothing is saved yet
        Life(killed, death=Death(STEP, 6)),  # in the middle of batch 2
        Life(killed, death=Death(SHARDS, 1)),  # in the middle of saving after batch 4
        Life(killed, death=Death(RENAME, 2)),  # the same, with its name but without its marker
        # The last version: after batch 4 was saved.
        Life(killed, death=Death(PUBLISH, 4, needs="checkpoints/batch_4/COMMITTED")),
        Life(killed, death=Death(STEP, 1)),  # resumed after batch 4
        Life(killed, death=Death(STEP, 2), damages_newest=True),
        Life(killed),
        Life(killed),
        Life(resized, num_ranks=2, death=Death(STEP, 6, rank=1)),
        *(Life(resized, num_ranks=4, death=Death(STEP, 2)) for _ in range(int(FULL))),
        Life(resized, num_ranks=1),
        Life(full, num_ranks=2, failure=Failure(WRITE_SHARD, 1, rank=1)),
        Life(lagging),
        Life(late, death=Death(STEP, 8)),
        Life(late),
        *(asked_lives(lagged(make_story(world, "controlled", CONTROLLED))) if FULL else ()),
        Life(late, replays=4),
        Life(killed, replays=3),
        Life(of("twice", options=TWICE)),
        Life(of("twice-killed", options=TWICE), death=Death(STEP, 7)),  # in pass 2 of batch 1
        Life(of("twice-killed", options=TWICE)),
        Life(of("twice-killed", options=TWICE), replays=2),
        Life(supervised("pairs")),
        Life(supervised("pairs-killed"), death=Death(STEP, 4)),
        Life(supervised("pairs-killed")),
    ]  # fmt: skip


def asked_lives(controlled):
    """Its options are set while it trains, a rank is killed meanwhile, and it is stopped."""
    return [
        Life(controlled, num_ranks=2, death=Death(STEP, 9), asks=(
            Ask(STEP, 3, ("set", "learning_rate=1e-3", "max_staleness=2")),
            Ask(STEP, 8, ("set", "learning_rate=5e-4")),  # its rank is killed before that holds
        )),
        Life(controlled, num_ranks=2, asks=(Ask(STEP, 1, ("stop",)),)),
        Life(controlled, num_ranks=2),
        Life(controlled, num_ranks=2, replays=7),
    ]  # fmt: skip


def lagged(story):
    """Its completions, sampled one version earlier: generation runs ahead."""
    groups = {}
    for key, told in story.groups.items():
        completions = []
        for completion in told.completions:
            (span,) = completion.weights_versions
            version = span.version._replace(batches=max(0, span.version.batches - 1))
            completions.append(
                replace(completion, weights_versions=(span._replace(version=version),))
            )
        groups[key] = replace(told, completions=tuple(completions))
    return replace(story, groups=groups)


@pytest.fixture(scope="module")
def lived(world, lives):
    """Outcomes by run, in order, and the weights that the services have loaded."""
    torch.save(lives, world.folder / "lives.pt")
    script = Path(__file__).with_name("resumed_loop.py")
    with scripted_services(world.address, namespace=NAMESPACE, vocab_size=128) as services:
        finished = subprocess.run(
            [sys.executable, str(script), str(world.folder / "lives.pt"),
             str(world.folder / "outcomes.json")],
            env=environment(), capture_output=True, text=True, timeout=1100,
        )  # fmt: skip
        loaded = ray.get(services[-1].loaded.remote(), timeout=TIMEOUT_S)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    outcomes = {}
    for life, outcome in zip(
        lives, json.loads((world.folder / "outcomes.json").read_text()), strict=True
    ):
        what = "" if life.replays is None else " replayed"
        name = Path(life.story.config.recording.output_dir).name + what
        outcomes.setdefault(name, []).append(outcome)
    return outcomes, loaded


def checkpoint(world, name, batches):
    """The folder; `batch_4.2` where a damaged `batch_4` was made again."""
    return max((world.folder / name / "checkpoints").glob(f"batch_{batches}*"))


def manifest(world, name, batches):
    return json.loads((checkpoint(world, name, batches) / "manifest.json").read_text())


def tensors(world, name, batches):
    """Of all files: the bytes of two equal ones differ, for safetensors shuffles its metadata."""
    found = {}
    for file in checkpoint(world, name, batches).glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def state_of(manifest):
    """Without the sizes of files whose lines hold times."""
    state = manifest["state"]
    timing = ("file_bytes", "seconds")
    return state | {"report": {k: v for k, v in state["report"].items() if k not in timing}}


def codes(outcomes):
    return [outcome["codes"] for outcome in outcomes]


def logs(outcomes):
    return "\n".join(outcome["log"] for outcome in outcomes)


def exports(world, name):
    return {f.name: load_file(f / "model.safetensors")
            for f in (world.folder / name / "hf_format").iterdir()}  # fmt: skip


def check_groups(world, name, num_ordinals):
    """Every slot has one group that counts, whatever was killed."""
    fates = {}
    for sample in world.samples(name):
        fates.setdefault(sample["ordinal"], []).append(sample["fate"])
    assert sorted(fates) == list(range(num_ordinals))
    for ordinal, found in fates.items():
        assert sum(fate != "replaced" for fate in found) == GROUP, (ordinal, found)


def test_lives_end_as_they_were_told_to(lived):
    outcomes, _ = lived
    assert codes(outcomes["alone"]) == [[0]], logs(outcomes["alone"])
    assert codes(outcomes["killed"]) == [[-9]] * 7 + [[0]] * 2, logs(outcomes["killed"])
    assert codes(outcomes["full"]) == [[0, 0]], logs(outcomes["full"])
    assert codes(outcomes["late"]) == [[-9], [0]], logs(outcomes["late"])
    assert codes(outcomes["resized"])[0][1] == -9
    assert codes(outcomes["resized"])[-1] == [0], logs(outcomes["resized"])


@pytest.mark.parametrize("batches", [4, 5])
def test_a_run_killed_seven_times_has_the_bits_of_one_left_alone(lived, world, batches):
    """Policy, moments, random states, reference; clocks, ledger, counters; S = 0, one rank."""
    alone, killed = manifest(world, "alone", batches), manifest(world, "killed", batches)
    bits = tensors(world, "alone", batches)
    assert_same_bits(tensors(world, "killed", batches), bits)
    groups = {name.partition(".")[0] for name in bits}
    assert groups == {"policy", "exp_avg", "exp_avg_sq", "rank_0", "reference_3"}
    assert state_of(killed) == state_of(alone)
    clocks = alone["state"]["clocks"]
    assert clocks["steps"] == 2 * batches
    counted = [s for s in world.samples("alone") if s["fate"] in ("trained", "zero_contribution")]
    written = sum(s["num_output_tokens"] for s in counted if s["batch"] < batches)
    assert clocks["tokens"] == written > 0


def test_its_metrics_and_learning_rates_go_on_as_if_nothing_had_happened(lived, world):
    alone, killed = (
        [without_timing(row) for row in world.rows(name)] for name in ("alone", "killed")
    )
    assert [row["step"] for row in killed] == list(range(1, 11))
    assert len({row["learning_rate"] for row in killed}) == 10
    assert killed == alone


def test_its_questions_are_each_sampled_for_one_group_that_counts(lived, world):
    check_groups(world, "alone", 30)
    check_groups(world, "killed", 30)
    alone, killed = (
        sorted((s["ordinal"], s["attempt"], s["index"], s["fate"]) for s in world.samples(name))
        for name in ("alone", "killed")
    )
    assert killed == alone


def test_each_epoch_of_windows_asks_every_line_once_over_all_lives(lived, world):
    drawn = [sample for sample in world.samples("killed") if sample["attempt"] == 0]
    asked = {sample["ordinal"]: sample["input"] for sample in drawn}
    for first in (0, 8, 16):  # the file has eight lines
        assert len({asked[ordinal] for ordinal in range(first, first + 8)}) == 8


def test_its_exports_are_those_of_the_run_left_alone(lived, world):
    alone, killed = exports(world, "alone"), exports(world, "killed")
    assert alone.keys() == killed.keys() and len(alone) >= 3
    for name, weights in alone.items():
        assert all(torch.equal(weights[key], killed[name][key]) for key in weights)


def test_weights_and_references_of_a_version_are_the_same_in_every_life(lived, world):
    """Version 0 of the reference is the model folder's, never the resumed policy's."""
    _, loaded = lived
    incarnations = sorted({version.incarnation for version, _ in loaded})
    exact = set(incarnations[:9])  # the run left alone, and the killed one's lives
    by_version = {}
    for version, digest in loaded:
        if version.incarnation in exact:
            by_version.setdefault(version.batches, set()).add(digest)
    assert {batches: len(digests) for batches, digests in by_version.items()} == dict.fromkeys(
        range(6), 1
    )
    after_resume = [[v.batches for v, _ in loaded if v.incarnation == i] for i in incarnations]
    assert after_resume[3][:2] == [2, 0], "resumed after batch 2: the reference has not moved"
    assert after_resume[6][:2] == [4, 3], "resumed after batch 4: the reference of batch 3"


def test_the_user_is_told_where_a_run_goes_on_and_what_is_passed_over(lived):
    killed = [outcome["log"] for outcome in lived[0]["killed"]]
    assert "it starts again from its first batch" in killed[1]
    assert "goes on after batch 2" in killed[2] and "goes on after batch 2" in killed[3]
    assert "goes on after batch 2" in killed[4]
    assert "goes on after batch 4" in killed[5]
    assert "passed over" in killed[6] and "goes on after batch 2" in killed[6]
    assert "all 5 batches" in killed[8] and "larger --num-training-batches" in killed[8]


def test_another_number_of_ranks_goes_on_with_the_same_numbers(lived, world):
    """Not the same bits: other shards and rounds add up in another order."""
    assert manifest(world, "resized", 5)["world_size"] == 1
    alone, resized = exports(world, "alone"), exports(world, "resized")
    last = max(alone, key=lambda name: int(name.removeprefix("samples_")))
    start = load_file(Path(world.model) / "model.safetensors")
    moved, should = (
        {key: weights[last][key].double() - start[key].double() for key in start}
        for weights in (resized, alone)
    )
    assert relative_difference(moved, should) < 1e-4
    assert [row["fate_trained"] for row in world.rows("resized")] == [
        row["fate_trained"] for row in world.rows("alone")
    ]
    check_groups(world, "resized", 30)


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(lived, world):
    """Rank 1 cannot write its shard: neither rank hangs, and later saves are good."""
    log = logs(lived[0]["full"])
    assert "the checkpoint after batch 2 FAILED" in log and "No space left on device" in log
    rows = world.rows("full")
    assert len(rows) == 10
    assert rows[-1]["failed_checkpoints"] == 1
    kept = sorted(path.name for path in (world.folder / "full" / "checkpoints").iterdir())
    assert kept == ["batch_4", "batch_5"]
    assert manifest(world, "full", 5)["state"]["report"]["failed_checkpoints"] == 1


def test_generation_that_ran_ahead_is_sampled_again_once(lived, world):
    """S = 1: what had begun of later batches is discarded, counted, and issued again."""
    rows, alone = world.rows("late"), world.rows("lagging")
    for name in ("step", "iteration", "total_samples_accumulated", "optimizer_steps",
                 "learning_rate", "fate_trained", "fate_zero_contribution"):  # fmt: skip
        assert [row[name] for row in rows] == [row[name] for row in alone]
    check_groups(world, "late", 30)
    ledger = manifest(world, "late", 5)["state"]["resume"]["ledger"]
    assert ledger["open"] == []
    assert ledger["admitted_samples"] == sum(ledger["samples"].values())
    assert ledger["output_tokens"] == sum(ledger["tokens"].values()) > 0
    assert Counter(ledger["slots"]).total() == 30
    late, lagging = exports(world, "late"), exports(world, "lagging")
    last = max(lagging, key=lambda name: int(name.removeprefix("samples_")))
    start = load_file(Path(world.model) / "model.safetensors")
    moved, should = (
        {key: weights[last][key].double() - start[key].double() for key in start}
        for weights in (late, lagging)
    )
    assert relative_difference(moved, should) < 1e-4


def test_a_run_killed_in_a_second_pass_trains_each_sample_once_in_each_pass(lived, world):
    """Policy, moments, clocks and ledger to the bit: what the broken passes did is in none."""
    assert codes(lived[0]["twice-killed"]) == [[-9], [0]], logs(lived[0]["twice-killed"])
    assert "goes on after batch 1" in lived[0]["twice-killed"][1]["log"]
    assert_same_bits(tensors(world, "twice-killed", 3), tensors(world, "twice", 3))
    alone, killed = manifest(world, "twice", 3), manifest(world, "twice-killed", 3)
    assert state_of(killed) == state_of(alone)
    rows, again = (
        [without_timing(row) for row in world.rows(name)] for name in ("twice", "twice-killed")
    )
    assert rows == again
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["pass_number"] for row in rows] == [1, 1, 2, 2] * 3
    assert [row["drift_steps"] for row in rows] == [0, 1, 2, 3] * 3
    assert len({row["learning_rate"] for row in rows}) == 12
    check_groups(world, "twice-killed", 18)
    for name in ("fate_trained", "fate_zero_contribution", "num_samples", "avg_reward"):
        of_batches = [[row[name] for row in rows[n : n + 4]] for n in (0, 4, 8)]
        assert all(own[:2] == own[2:] for own in of_batches), name
    assert any(row["clip_fraction"] for row in rows)
    totals = [row["total_samples_accumulated"] for row in rows]
    assert totals[1] == totals[3] and totals[-1] == 18 * GROUP
    clocks, ledger = alone["state"]["clocks"], alone["state"]["resume"]["ledger"]
    assert clocks == {
        "steps": 12,
        "samples": 2 * totals[-1],
        "tokens": 2 * rows[-1]["total_tokens"],
    }
    assert ledger["samples"]["trained"] == sum(r["fate_trained"] for r in rows) // 2


def test_a_supervised_run_goes_on_to_the_bit(lived, world):
    assert codes(lived[0]["pairs-killed"]) == [[-9], [0]], logs(lived[0]["pairs-killed"])
    assert_same_bits(tensors(world, "pairs-killed", 4), tensors(world, "pairs", 4))
    killed = manifest(world, "pairs-killed", 4)
    tokens = killed["state"]["report"]["tokens"]
    assert killed["state"]["clocks"] == {"steps": 8, "samples": 16, "tokens": tokens}
    first, second = (
        [without_timing(row) for row in world.rows(name)] for name in ("pairs", "pairs-killed")
    )
    assert first == second and len(first) == 8
    evaluations = "evaluation_metrics.jsonl"
    files = [world.folder / name / evaluations for name in ("pairs", "pairs-killed")]
    first, second = (
        [without_timing(json.loads(line)) for line in file.read_text().splitlines()]
        for file in files
    )
    assert first == second
    assert [row["step"] for row in first] == [0, 4, 8]  # before, after two batches, at the end
    assert first[0]["eval_loss"] > first[-1]["eval_loss"]


@pytest.mark.parametrize(
    "name, start, batches",
    [
        ("late", "batch_3", "batches 3 to 4"),
        ("killed", "model", "batches 0 to 3"),
        ("twice-killed", "batch_", "batch"),
        pytest.param("controlled", "batch_", "", marks=ASKED),
    ],
)
def test_a_batch_of_a_run_that_was_killed_is_replayed_to_the_bit(lived, name, start, batches):
    """One ran ahead (S = 1), one had nine lives, of one the options were set while it trained."""
    (outcome,) = lived[0][f"{name} replayed"]
    assert set(outcome["codes"]) == {0}, outcome["log"]
    told = [line for line in outcome["log"].splitlines() if line.startswith(("from", "equal"))]
    first, last = told
    assert start in first and last.startswith(f"equal: {batches}")


@ASKED
def test_what_was_asked_of_a_run_holds_from_a_batch_on_and_over_a_resume(lived, world):
    """On two ranks; the audit of each step, and its clocks, would tell if they differed."""
    killed, *others = codes(lived[0]["controlled"])
    assert (killed[0], others) == (-9, [[0, 0], [0, 0]]), logs(lived[0]["controlled"])
    journal = lines(world.folder / "controlled" / "control.jsonl")
    slower, slowest, stop = (
        [line for line in journal if (line["action"], len(line["settings"])) == kind]
        for kind in (("set", 2), ("set", 1), ("stop", 0))
    )
    assert [line["state"] for line in slower] == ["asked", "done"]
    assert slower[1]["from_batch"] in (2, 3)
    assert [line["state"] for line in stop] == ["asked", "done"]
    assert slowest[0]["state"] == "asked" and slowest[-1]["state"] == "done"
    assert slowest[-1]["from_batch"] >= 4, "the first life has died before"
    first, second = slower[1]["from_batch"], slowest[-1]["from_batch"]
    rates = {row["iteration"]: row["learning_rate"] for row in world.rows("controlled")}
    assert rates == {
        batch: 1e-2 if batch < first else 1e-3 if batch < second else 5e-4 for batch in range(8)
    }
    settings = manifest(world, "controlled", 8)["state"]["settings"]
    assert settings == {
        "learning_rate": {"was": 1e-2, "is": 5e-4},
        "max_staleness": {"was": 1, "is": 2},
    }
    check_groups(world, "controlled", 48)
