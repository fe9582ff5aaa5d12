"""Which workers of a file go to which node of a cluster."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.cli.assignment import Node, dispatched, dispatches, in_words, placed
from async_grpo.cli.launch_file import awaited_nodes, launch
from async_grpo.cli.local_run import options_of_run, planned
from async_grpo.cli.run_processes import trainers_of
from async_grpo.cluster.cluster import Room
from async_grpo.devices.inventory import Inventory
from async_grpo.launch.local_ranks import TRAINER_NODE
from async_grpo.util.errors import ConfigError, DeadlineError

REPOSITORY = Path(__file__).parents[2]
FILE = """
[[worker]]
model_path = "m"
num_workers = {generation}

[[worker]]
model_path = "m"
mode = "logprob"
num_workers = {logprob}

[[worker]]
mode = "environment"

[train]
model_name_or_path = "m"
data_path = "d"
nproc_per_node = {ranks}
"""


def run_of(folder, *, generation=1, logprob=1, ranks=1):
    file = folder / "run.toml"
    file.write_text(FILE.format(generation=generation, logprob=logprob, ranks=ranks))
    typed = [str(file), "--ray-address", "head:1"]
    return planned(**options_of_run(launch.make_context("launch", typed).params))


def nodes_of(*devices, cpus=64.0):
    return [Node(f"n{i}", f"10.0.0.{i}", count, cpus) for i, count in enumerate(devices)]


def counts(found):
    return [(each.worker, each.node.node_id, each.count) for each in found]


def test_deepscaler_samples_and_scores_on_two_machines_and_trains_on_this_one(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    typed = ["examples/deepscaler.toml", "--ray-address", "head:1"]
    run = planned(**options_of_run(launch.make_context("launch", typed).params))
    found = dispatches(run, nodes_of(8, 8, 8))
    assert counts(found) == [(0, "n1", 6), (0, "n2", 8), (1, "n1", 2)]
    assert in_words(run, found) == (
        "6 generation on 10.0.0.1, 8 generation on 10.0.0.2, 2 reference on 10.0.0.1"
    )


def test_a_dispatcher_has_its_share_of_the_table(tmp_path):
    run = run_of(tmp_path, generation=3)
    found = dispatches(run, nodes_of(2, 2, 2))
    assert counts(found) == [(0, "n1", 1), (0, "n2", 2), (1, "n1", 1), (2, "n0", 1)]
    generation, logprob, environment = run.workers
    assert dispatched(run, found).workers == (
        replace(generation, num_workers=1), replace(generation, num_workers=2), logprob, environment
    )  # fmt: skip


def test_one_node_has_all(tmp_path):
    run = run_of(tmp_path, generation=5)
    assert counts(dispatches(run, nodes_of(0))) == [(0, "n0", 5), (1, "n0", 1), (2, "n0", 1)]


def test_without_devices_workers_go_where_cpus_are_left(tmp_path):
    run = run_of(tmp_path, generation=3)
    nodes = [Node("here", "a", 0, 2.0), Node("there", "b", 0, 2.5)]
    assert counts(dispatches(run, nodes)) == [
        (0, "here", 2), (0, "there", 1), (1, "there", 1), (2, "here", 1),
    ]  # fmt: skip


def test_ranks_that_do_not_fit_on_this_machine_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="4 ranks must be on this machine, which has 2 free"):
        dispatches(run_of(tmp_path, ranks=4), nodes_of(2, 8))


def test_ranks_may_have_devices_of_which_ray_was_not_told(tmp_path):
    found = dispatches(run_of(tmp_path, ranks=4), nodes_of(0, 2))
    assert counts(found) == [(0, "n1", 1), (1, "n1", 1), (2, "n0", 1)]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 3))
def test_no_node_gives_more_than_it_has(tmp_path_factory, devices, generation, logprob):
    run = run_of(tmp_path_factory.mktemp("run"), generation=generation, logprob=logprob)
    nodes = nodes_of(*devices)
    try:
        found = dispatches(run, nodes)
    except ConfigError:
        return
    taken = Counter()
    for each in found:
        if run.workers[each.worker].num_devices:
            taken[each.node.node_id] += each.count * each.share
    if len(nodes) > 1 and any(devices):
        assert all(taken[node.node_id] <= node.devices + 1e-9 for node in nodes)
    assert {each.worker for each in found} == {0, 1, 2}


def trained_on(folder, machines, *, ranks=8, generation=8):
    run = run_of(folder, generation=generation, ranks=ranks)
    return replace(run, num_ranks=machines * ranks, trainer_nodes=machines)


def test_several_machines_train_and_the_others_sample(tmp_path):
    run = trained_on(tmp_path, 2, generation=14)
    found = dispatches(replace(run, await_nodes=4), nodes_of(8, 8, 8, 8))
    assert counts(found) == [(0, "n2", 6), (0, "n3", 8), (1, "n2", 1), (2, "n0", 1)]
    assert run.tables["train"][0]["nproc_per_node"] == 8
    assert run.tables["launch"][0]["trainer_nodes"] == 2


@pytest.mark.parametrize(
    ("ranks", "devices", "words"),
    [
        (4, (8, 8, 8), r"all devices of each of 2 trainer nodes, got 4, and .* \[8, 8, 8\] free"),
        (8, (8, 4, 8), r"all devices of each of 2 trainer nodes, got 8"),
        (8, (0, 8, 8), r"all devices of each of 2 trainer nodes, got 8"),
    ],
)
def test_ranks_that_are_not_all_devices_of_their_machines_are_refused(
    ranks, devices, words, tmp_path
):
    with pytest.raises(ConfigError, match=words):
        dispatches(trained_on(tmp_path, 2, ranks=ranks), nodes_of(*devices))


def test_machines_that_train_need_a_cluster(tmp_path):
    run = replace(trained_on(tmp_path, 2), ray_address="")
    with pytest.raises(ConfigError, match="must be 1 without --ray-address, got 2"):
        placed(run, Inventory())


def test_machines_that_train_are_told_which_they_are_and_meet_at_the_first(tmp_path):
    run = trained_on(tmp_path, 2)
    here, [other] = trainers_of(run, nodes_of(8, 8, 8), {"OWN": "1"})
    first, second = (each.environment[TRAINER_NODE].split() for each in (here, other.process))
    assert (first[:3], second[:3]) == (["0", "2", "10.0.0.0"], ["1", "2", "10.0.0.0"])
    assert first[3] == second[3] and other.node_id == "n1"
    assert other.process.environment["RAY_ADDRESS"] == "head:1"
    assert "OWN" not in other.process.environment and other.process.may_end and not here.may_end
    alone, others = trainers_of(run_of(tmp_path), nodes_of(8, 8), {})
    assert TRAINER_NODE not in alone.environment and not others


class Joining:
    """A cluster that one more node has joined at each look."""

    def __init__(self, *hosts):
        self._hosts, self._looks = hosts, 0

    def nodes_with_room(self):
        self._looks += 1
        return [Room(host, host, {"CPU": 8.0, "GPU": 4.0}) for host in self._hosts[: self._looks]]


def test_a_run_waits_for_its_nodes_and_names_those_that_came():
    found = awaited_nodes(Joining("a", "b", "c"), 2, within_s=30)
    assert found == (Node("a", "a", 4, 8.0), Node("b", "b", 4, 8.0))
    with pytest.raises(DeadlineError, match=r"must have 3 nodes within 0 s, got a: see what"):
        awaited_nodes(Joining("a", "b", "c"), 3, within_s=0)
