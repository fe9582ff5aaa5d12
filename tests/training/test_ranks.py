"""What a collective's own error says of another rank."""

import json
import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import PRELOADED, run_ranks

from async_grpo.run.watch import RunRecord, first_failure_recorded
from async_grpo.training.ranks import Ranks, as_ranks_failure
from async_grpo.util import deadlines
from async_grpo.util.errors import CollectiveTimeout, RankLostError, RendezvousError
from async_grpo.util.ports import free_port

TIMEOUT_S = 1.0
PARTED = (
    "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
    "NCCL error: remote process exited or there was a network error",
)


def one_rank_does_not_join(rank, *, run):
    """Rank 1 stays away from the third of three sums; what rank 0's run died of."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    for size in range(1, 3):
        dist.all_reduce(torch.ones(size), group=group)
    failure = Path(run, "first_failure.json")
    if rank:
        while not failure.exists():
            time.sleep(0.02)
        return None
    ranks = Ranks(rank, 2, torch.device("cpu"), None)
    with (
        pytest.raises(CollectiveTimeout) as raised,
        first_failure_recorded(RunRecord(run, rank=rank), ranks),
    ):
        dist.all_reduce(torch.ones(7, 512, dtype=torch.bfloat16), group=group)
    return str(raised.value)


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """(the run's folder, the error of the rank that waited)"""
    folder, run = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("run")
    said, _ = run_ranks(one_rank_does_not_join, num_ranks=2, folder=folder, run=str(run))
    return run, said


def test_a_rank_that_waits_in_vain_names_itself_its_collective_and_the_size(died):
    run, said = died
    assert said.startswith(
        "trainer rank 0 waited in vain for another rank in gloo:all_reduce of BFloat16 [7, 512] ("
    )
    assert "of 1 s)" in said and f"{run}/collectives_rank_0.json has those before it" in said
    record = json.loads((run / "first_failure.json").read_text())
    assert (record["sentence"], record["exception"]) == (said, "CollectiveTimeout")


def test_torch_s_record_is_kept_in_the_run_s_folder_until_the_next_start(died):
    run, _ = died
    entries = json.loads((run / "collectives_rank_0.json").read_text())["entries"]
    assert [entry["input_sizes"] for entry in entries][-3:] == [[[1]], [[2]], [[7, 512]]]
    RunRecord(run, rank=0).forget()
    assert not list(run.iterdir())


def test_without_a_folder_to_keep_it_in_the_collective_s_time_out_is_told(tmp_path):
    late = RuntimeError(
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"
    )
    failure = as_ranks_failure(late, tmp_path / "nowhere")
    assert isinstance(failure, CollectiveTimeout) and failure.__cause__ is late
    assert "those before it cannot be kept" in str(failure)


@pytest.mark.parametrize("said", PARTED)
def test_a_collective_whose_peer_has_gone_means_that_a_rank_has_died(said, tmp_path):
    assert isinstance(as_ranks_failure(RuntimeError(said), tmp_path), RankLostError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"), RuntimeError("out of memory"), RankLostError(),
        RendezvousError(f"trainer ranks must reach each other, got {PARTED[0]}"),
    ],
)  # fmt: skip
def test_an_error_of_nobody_else_stays_as_it_is(error, tmp_path):
    assert as_ranks_failure(error, tmp_path) is None


def meet(environ):
    """The error of a rank that starts with these variables."""
    deadlines.RANKS_START_S = 1.0
    os.environ.update(environ)
    with pytest.raises(RankLostError) as raised:
        Ranks.start(timeout_s=TIMEOUT_S)
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize(
    ("interface", "here", "cause"),
    [
        ("lo", "lo (127.0.0.1)", "1/2 clients joined"),
        ("eth99", "eth99 (no address)", "Unable to find address for: eth99"),
        ("", "its host name's", "1/2 clients joined"),
    ],
)
def test_ranks_that_cannot_connect_name_address_and_interface_and_no_dead_rank(
    interface, here, cause
):
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_agent = interface == "eth99"  # torchrun's store waits for nobody
    port = store.port if of_agent else free_port()
    environ = {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface, "TORCHELASTIC_USE_AGENT_STORE": str(of_agent),
    }  # fmt: skip
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        kind, sentence = pool.apply(meet, [environ])
    assert kind is RendezvousError
    begin = f"trainer ranks must reach each other; rank 0, by the interface {here}"
    assert sentence.startswith(f"{begin} and addresses learnt at 127.0.0.1:{port}, got ")
    assert cause in sentence
    assert "set GLOO_SOCKET_IFNAME on every machine" in sentence
