"""Runs whose controller, or whose rank 0, is killed at the moments that could cost a sample.

Real controllers, trainers and checkpoints on one rank and on two; two scripted workers of every
role, which register again with every new controller. After each kill: nothing lost, doubled or
stale, no lease left, and every bit of the weights as in the run that is left alone.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_cluster import environment
from resumed_loop import Death, Life
from safetensors.torch import load_file
from scripted_services import ROLES, TIMEOUT_S, WORKERS, scripted_services
from stories import NAMESPACE, World, make_story
from test_resumed_loop import assert_same_bits, check_groups
from test_scripted_loop import without_timing

from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import CONTROLLER

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

OPTIONS = {
    "deterministic": True,
    "max_staleness": 0,
    "batch_size": 6,
    "train_minibatch_size": 3,
    "num_training_batches": 3,
    "checkpoint_every_batches": 1,
    "ratio_mode": "decoupled",
    "importance_correction": "truncate",
    "correction_high": 1.2,
    "kl_coefficient": 0.05,
    "num_batches_per_ref_model_update": 2,
    "dynamic_sampling": 1,
    "learning_rate": 1e-2,
    "eval_every_batches": 1,
}
NUM_QUESTIONS = OPTIONS["batch_size"] * OPTIONS["num_training_batches"]
# By moment: when the controller is killed, see `scripted_loop.Killer`, and when rank 0 is.
MOMENTS = {
    "after-k-of-n-rounds": (
        ("minibatch", 5),  # within a step on one rank and on two: its end comes with its last
        Death("async_grpo.training.learner:Learner.accumulate", 4),
    ),
    "end-of-step-on-one-rank": (
        ("held end", 3),
        Death("async_grpo.run.main_rank:RunAtController.step_agreed", 3),
    ),
    "between-step-and-publication": (
        ("publish", 1),
        Death("async_grpo.run.sampled_data:SampledData.publish", 2),
    ),
    "half-of-the-workers-loaded": (
        ("announce", 1),
        Death("async_grpo.run.publication:Announcements.begin", 2, after_s=1.0),
    ),
    "in-an-evaluation": (
        ("evaluate", 1),
        Death("async_grpo.run.report:Report.published", 2, after_s=1.0),
    ),
}
KILLED = [
    (moment, victim, num_ranks)
    for num_ranks in (1, 2)
    for moment in MOMENTS
    for victim in ("controller", "rank-0")
]
CHANGED = (
    "batcher_restarts",
    *("fate_discarded", "discarded_restart"),
    *("token_fate_discarded", "token_fate_discarded_restart"),
)


@pytest.fixture(scope="module")
def world(ray_cluster, questions, tmp_path_factory):
    return World(tmp_path_factory.mktemp("kills"), ray_cluster, questions)


def name_of(moment, victim, num_ranks):
    return f"{moment}-{victim}-{num_ranks}"


@pytest.fixture(scope="module")
def lived(world):
    """Outcomes by run, in order, and the leases that were left after all of them."""
    options = OPTIONS | {"eval_data_path": world.questions}
    story = replace(make_story(world, "alone", options), slow_load_s=2.0, latency_s=0.3)
    lives = [
        Life(replace(story, config=world.config(f"alone-{n}", options)), num_ranks=n)
        for n in (1, 2)
    ]
    for moment, victim, num_ranks in KILLED:
        kill, death = MOMENTS[moment]
        config = world.config(name_of(moment, victim, num_ranks), options)
        own = replace(story, config=config)
        if victim == "controller":
            lives += [Life(replace(own, kills=frozenset({kill})), num_ranks=num_ranks)]
        else:
            lives += [Life(own, num_ranks=num_ranks, death=death), Life(own, num_ranks=num_ranks)]
    torch.save(lives, world.folder / "lives.pt")
    script, outcomes = Path(__file__).with_name("resumed_loop.py"), world.folder / "outcomes.json"
    services = {"namespace": NAMESPACE, "vocab_size": 128, "names": WORKERS}
    with scripted_services(world.address, **services):
        finished = subprocess.run(
            [sys.executable, str(script), str(world.folder / "lives.pt"), str(outcomes)],
            env=environment(), capture_output=True, text=True, timeout=1500,
        )  # fmt: skip
        controller = Cluster().find_actor(CONTROLLER)

        def ask(call):
            return Cluster().wait(call, timeout_s=TIMEOUT_S, who="the controller")

        left = []
        for role in ROLES:  # the scripted workers have the same names in each
            names = [info.worker_id for info in ask(controller.members.remote(role))]
            left += ask(controller.standing.remote({role: names})).values()
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    found = {}
    for life, outcome in zip(lives, json.loads(outcomes.read_text()), strict=True):
        found.setdefault(Path(life.story.config.recording.output_dir).name, []).append(outcome)
    return found, [worker.num_leases for worker in left]


@pytest.mark.parametrize(("moment", "victim", "num_ranks"), KILLED)
def test_a_kill_costs_nothing_but_time(lived, world, moment, victim, num_ranks):
    name, alone = name_of(moment, victim, num_ranks), f"alone-{num_ranks}"
    *killed, last = lived[0][name]
    assert last["codes"] == [0] * num_ranks, last["log"]
    assert [outcome["codes"][0] for outcome in killed] == [-9] * (victim == "rank-0")
    check_weights(world, name, alone)
    check_groups(world, name, NUM_QUESTIONS)
    assert sorted(map(identity, world.samples(name))) == sorted(map(identity, world.samples(alone)))
    rows = [books(row) for row in world.rows(name)]
    assert rows == [books(row) for row in world.rows(alone)]
    assert all(row["max_lag"] == 0 for row in rows)
    if victim == "controller":
        is_after_all_steps = moment == "in-an-evaluation"
        assert world.rows(name)[-1]["batcher_restarts"] == (not is_after_all_steps)


def check_weights(world, name, alone):
    """Every exported version has the bits of the run that was left alone."""
    found, expected = world.versions(name), world.versions(alone)
    assert len(found) == len(expected) == OPTIONS["num_training_batches"]
    for file, other in zip(found, expected, strict=True):
        assert_same_bits(load_file(file), load_file(other))


def identity(sample):
    return sample["ordinal"], sample["attempt"], sample["index"], sample["fate"]


def books(row):
    """What a line of metrics tells, but for times and for what a kill may cost."""
    return {name: value for name, value in without_timing(row).items() if name not in CHANGED}


def test_runs_that_nobody_kills_end_well(lived):
    for num_ranks in (1, 2):
        (outcome,) = lived[0][f"alone-{num_ranks}"]
        assert outcome["codes"] == [0] * num_ranks, outcome["log"]


def test_no_lease_is_left_of_any_run(lived):
    assert len(lived[1]) >= len(ROLES)
    assert not any(lived[1])
