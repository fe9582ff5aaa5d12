"""Whole runs of the real trainer on several ranks, whose services follow a story.

One torchrun trains them all: real registries, batcher, pipeline, streams, learners, weight syncs
and exports; completions, rewards, reference scores and latencies are scripted.
"""

import hashlib
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from effort import FULL, max_ranks
from oracle import relative_difference
from paper_run import KNOWN_UPDATES, play
from private_cluster import environment
from safetensors.torch import load_file
from scripted_services import scripted_services
from stories import GROUP, NAMESPACE, World, lagging_story, lines, make_story
from tiny_models import load_model

from async_grpo.types import WeightsVersion

pytestmark = pytest.mark.integration

TOLERANCE = 1e-5
NUM_RANKS = max_ranks(2)
DETERMINISTIC = {
    "deterministic": True,
    "max_staleness": 0,
    "batch_size": 6,
    "train_minibatch_size": 3,
    "num_training_batches": 3,
    "ratio_mode": "decoupled",
    "importance_correction": "truncate",
    "correction_high": 1.2,
    "kl_coefficient": 0.05,
    "dynamic_sampling": 1,
    "mask_truncated_samples": True,
    "learning_rate": 1e-2,
}
LAGGING = {
    "behaviour": (2, {"max_staleness": 2, "num_training_batches": 5}),
    "decoupled": (
        1,
        {
            "max_staleness": 2,
            "num_training_batches": 4,
            "train_minibatch_size": 2,
            "ratio_mode": "decoupled",
            "importance_correction": "truncate",
            "correction_high": 1.1,
        },
    ),
}
REPEATED = ("first", "second")
# Moments at which the batcher is killed: within the rounds of a step, right after the end of a
# batch (its weights are on their way), while the last evaluation is running. In full also when one
# rank alone has the end of a step, before weights are gathered, while half of the workers has them.
KILLS = {
    "killed": frozenset({("minibatch", 2), ("end", 2), ("evaluate", 1)}),
    "colocated": frozenset({("minibatch", 2), ("end", 2)}),  # workers and ranks work in turns
}
if FULL:
    KILLS["killed again"] = frozenset({("held end", 3), ("publish", 1), ("announce", 1)})
STANDING = {"max_staleness": 1, "num_training_batches": 4, "learning_rate": 0.0}
TIMING = (
    "mfu",
    "peak_",
    "perc_continued",
    "perc_resampled",  # of the groups that happened to be sampled since the step before
    "seconds",
    "_per_second",
    "idle",
    "sync_",
    "avg_generating_samples",
    "avg_verifying_samples",
    "avg_scoring_samples",
    "retries",
)
LOST = ("fate_discarded", "discarded_worker_error")  # by the failure that one run alone has


@pytest.fixture(scope="module")
def world(ray_cluster, questions, tmp_path_factory):
    return World(tmp_path_factory.mktemp("scripted"), ray_cluster, questions)


@pytest.fixture(scope="module")
def papers(world):
    """By name: what the runs that lag behind, and the one that stands still, must come to."""
    fast = {"learning_rate": 0.1, "allow_high_learning_rate": True}
    cases = {name: (lag, {**KNOWN_UPDATES, **fast, **options})
             for name, (lag, options) in LAGGING.items()}  # fmt: skip
    cases["standing"] = (1, STANDING)
    papers = {}
    for name, (lag, options) in cases.items():
        config = world.config(name, options)
        model, prompts = load_model(world.model), world.prompts(config)
        papers[name] = config, play(model, config, prompts, lag=lag, seed=len(papers))
    return papers


@pytest.fixture(scope="module")
def trained(world, papers):
    """The folder's runs, by name; all of them have ended well."""
    plain = make_story(world, "synchronous", DETERMINISTIC)
    killed = DETERMINISTIC | {"eval_data_path": world.questions}
    stories = [
        replace(plain, is_synchronous=True),
        replace(plain, config=world.config("first", DETERMINISTIC), latency_seed=1,
                unlucky=frozenset({3})),
        replace(plain, config=world.config("second", DETERMINISTIC), latency_seed=2),
        *(
            replace(plain, config=world.config(name, killed | {"colocated": name == "colocated"}),
                    latency_seed=3, latency_s=0.5, kills=kills,
                    slow_load_s=2.0 if ("announce", 1) in kills else 0.0)
            for name, kills in KILLS.items()
        ),
        *(lagging_story(config, paper) for config, paper in papers.values()),
    ]  # fmt: skip
    torch.save(stories, world.folder / "stories.pt")
    script = Path(__file__).with_name("scripted_loop.py")
    with scripted_services(world.address, namespace=NAMESPACE, vocab_size=128) as _services:
        finished = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", str(NUM_RANKS),
                str(script), str(world.folder / "stories.pt"),
            ],
            env=environment(), capture_output=True, text=True, timeout=280,
        )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-12000:]
    return world


def hashes(files):
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def without_timing(row):
    return {name: value for name, value in row.items() if not any(t in name for t in TIMING)}


def test_a_deterministic_asynchronous_run_is_the_synchronous_one_to_the_bit(trained):
    """Held fixed: the ranks, options, completions, rewards, reference scores, S = 0, one thread.

    Not fixed: who answers when, and a worker's failure. Groups without variance are replaced once;
    outputs that were cut are masked, and count in D as zero contributions.
    """
    expected = hashes(trained.versions("synchronous"))
    assert len(set(expected)) == DETERMINISTIC["num_training_batches"]
    assert hashes(trained.versions("first")) == expected
    known = [
        {name: value for name, value in without_timing(row).items() if value is not None}
        for row in trained.rows("synchronous")
    ]
    assert len(known) == 6
    assert {"loss", "grad_norm", "kl", "mismatch_kl", "num_minibatches"} <= known[0].keys()
    found = [
        {name: row[name] for name in plain}
        for plain, row in zip(known, trained.rows("first"), strict=True)
    ]
    assert found == known
    samples = trained.samples("first")
    fates = Counter(sample["fate"] for sample in samples)
    kept = [sample for sample in samples if sample["fate"] != "replaced"]
    masked = sum(sample["finish_reason"] == "length" for sample in kept)
    trained_ones = {"trained": 18 * GROUP - masked, "zero_contribution": masked}
    assert fates == {**trained_ones, "replaced": 2 * GROUP} and masked > 1


def test_latencies_change_not_a_bit(trained):
    """Held fixed as above; other latencies, so another order of completion."""
    first, second = (hashes(trained.versions(name)) for name in REPEATED)
    assert first == second
    first, second = ([without_timing(row) for row in trained.rows(name)] for name in REPEATED)
    assert [[row.pop(name, 0) for name in LOST] for row in first][1] == [GROUP, GROUP]
    assert not any(row.pop(name, 0) for row in first + second for name in LOST)
    assert first == second
    first, second = ([sample["ordinal"] for sample in trained.samples(name)] for name in REPEATED)
    assert first != second


@pytest.mark.parametrize("name", KILLS)
def test_a_batcher_that_is_killed_changes_not_a_bit(trained, name):
    """Held fixed as above; each death costs the step that it interrupts, which is done again."""
    assert hashes(trained.versions(name)) == hashes(trained.versions("synchronous"))
    undisturbed, rows = trained.rows("second"), trained.rows(name)
    after_all_steps = ("evaluate", 1) in KILLS[name]
    assert rows[-1]["batcher_restarts"] == len(KILLS[name]) - after_all_steps
    changed = {"batcher_restarts", "fate_discarded", "discarded_restart"}
    changed |= {"token_fate_discarded", "token_fate_discarded_restart"}
    plain, found = (
        [{k: v for k, v in without_timing(row).items() if k not in changed} for row in own]
        for own in (undisturbed, rows)
    )
    assert found == plain
    first, second = (samples_by_key(trained.samples(n)) for n in ("second", name))
    assert first == second
    evaluations = lines(trained.folder / name / "evaluation_metrics.jsonl")
    last = rows[-1]["iteration"] + 1
    assert sorted(line["batch"] for line in evaluations) == [0, last]  # a line of each that was due
    done = [line for line in evaluations if "skipped" not in line]
    assert {(line["num_samples"], line["num_failed"]) for line in done} == {(32, 0)}
    assert done[-1]["batch"] == last


def samples_by_key(samples):
    """Each sample of a run's log, which must have it once."""
    found = {}
    for sample in samples:
        key = sample["ordinal"], sample["attempt"], sample["index"]
        assert key not in found
        found[key] = {**sample, "weights_versions": None}
    return found


@pytest.mark.parametrize("case", LAGGING)
def test_a_lag_of_k_versions_gives_the_update_that_was_worked_out_on_paper(case, trained, papers):
    _, paper = papers[case]
    start = paper.weights[0]
    versions = trained.versions(case)
    assert len(versions) == len(paper.weights) - 1
    for file, expected in zip(versions, paper.weights[1:], strict=True):
        moved = {name: value.double() - start[name] for name, value in load_file(file).items()}
        should = {name: expected[name].detach() - start[name] for name in expected}
        assert relative_difference(moved, should) < TOLERANCE


@pytest.mark.parametrize("case", LAGGING)
def test_a_lag_of_k_versions_gives_the_ratios_that_were_worked_out_on_paper(case, trained, papers):
    _, paper = papers[case]
    rows = trained.rows(case)
    assert len(rows) == len(paper.rows)
    for row, expected in zip(rows, paper.rows, strict=True):
        found = {name: row[name] for name in expected}
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    most = {name: max(row[name] for row in paper.rows) for name in paper.rows[0]}
    assert most["mismatch_max"] > 0.5 and most["clip_fraction"] > 0.1
    assert (most["corrected_fraction"] > 0.1) == (case == "decoupled")


@pytest.mark.parametrize("case", LAGGING)
def test_the_recorded_lag_is_the_one_that_was_forced(case, trained, papers):
    lag, _ = LAGGING[case]
    config, _ = papers[case]
    for row in trained.rows(case):
        forced = min(lag, row["iteration"])
        assert (row["avg_lag"], row["max_lag"]) == (forced, forced)
        assert row["fate_trained"] == config.batching.questions_per_step * GROUP
    for sample in trained.samples(case):
        (((version, start, stop),),) = sample["weights_versions"]
        assert WeightsVersion.parse(version).batches == max(0, sample["batch"] - lag)
        assert (start, stop) == (0, sample["num_output_tokens"])


@pytest.mark.slow  # in every run: test_resumed_loop.py, by processes that have imported all
def test_an_asynchronous_run_is_replayed_to_the_bit(trained):
    """Several ranks, from the first batch on; the old policy of each batch is computed again."""
    command = [sys.executable, "-m", "async_grpo.cli.main", "replay"]
    finished = subprocess.run(
        [*command, str(trained.folder / "decoupled")],
        env=environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    first, *_, last = finished.stdout.splitlines()
    assert first.endswith(f"on {NUM_RANKS} ranks")
    assert last.startswith("equal: batches 0 to 3")


def test_a_learning_rate_of_0_keeps_every_bit(trained):
    own = load_file(Path(trained.model) / "model.safetensors")
    for file in trained.versions("standing"):
        exported = load_file(file)
        assert exported.keys() == own.keys()
        assert all(torch.equal(exported[name], own[name]) for name in own)
    rows = trained.rows("standing")
    assert len(rows) == STANDING["num_training_batches"]
    assert max(row["mismatch_max"] for row in rows) <= 5e-6
    assert min(row["grad_norm"] for row in rows) > 0.1
    versions = {tuple(sample["weights_versions"][0][0]) for sample in trained.samples("standing")}
    assert len({version for version, _, _ in versions}) == 3  # lag 1: batches 0, 0, 1, 2
