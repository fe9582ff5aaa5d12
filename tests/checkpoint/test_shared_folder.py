"""Saves that two ranks take part in: one folder, each its own files, and both at the same batch."""

import socket

import pytest
from ranks import run_ranks
from shared_scenarios import all_saves, killed

from async_grpo.checkpoint.folder import CheckpointFolder
from async_grpo.checkpoint.reader import read_checkpoint

HOST = socket.gethostname()
REST = ("token", "synced", "told")  # beside "written": where a rank dies in a save


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def ranks(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(all_saves, num_ranks=2, folder=folder, root=str(root))


def test_each_rank_reads_its_own_files_back_once_and_rank_0_no_other(ranks, root):
    hashed = [rank["whole"][0] for rank in ranks]
    for batches in (1, 2):
        path = root / "whole" / "checkpoints" / f"batch_{batches}"
        files = read_checkpoint(path).files
        assert len(files) == 2 and {*hashed[0], *hashed[1]} == files.keys()
    assert [len(names) for names in hashed] == [2, 2]  # of two saves
    assert not set(hashed[0]) & set(hashed[1])


def test_both_saves_are_staged_in_the_same_memory(ranks):
    for rank in ranks:
        first, second = rank["whole"][1]
        assert first == second and len(first) > 70


def test_a_folder_that_ranks_do_not_share_is_refused_before_the_first_batch(ranks):
    sentences = [rank["apart"][0] for rank in ranks]
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith("checkpoints must lie in one folder for all ranks, ")
    assert f"of rank 0 on {HOST} is not that of rank 1 on {HOST}: give an" in sentences[0]


def test_a_save_there_writes_no_shards_and_is_counted(ranks, root):
    assert [rank["apart"][1] for rank in ranks] == [1, 1]
    assert [rank["apart"][2][2:] for rank in ranks] == [[], []]
    assert not list(root.glob("machine_*/run/checkpoints/.*"))


def test_bytes_that_another_rank_s_disk_changes_cost_the_save_alone(ranks, root):
    assert [rank["damaged"] for rank in ranks] == [1, 1]
    checkpoints = root / "damaged" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["batch_1"]
    assert CheckpointFolder(checkpoints, keep=2).newest().path.name == "batch_1"


@pytest.mark.parametrize(
    "at", ["written", *(pytest.param(at, marks=pytest.mark.slow) for at in REST)]
)
def test_a_rank_that_dies_in_a_save_costs_that_save_alone(tmp_path, at):
    output_dir = tmp_path / "run"
    with pytest.raises(FileNotFoundError):  # neither rank lives to return anything
        run_ranks(killed, num_ranks=2, folder=tmp_path, output_dir=str(output_dir), at=at)
    assert (output_dir / "failed").read_text() == "1"
    checkpoints = output_dir / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["batch_1"]
    assert CheckpointFolder(checkpoints, keep=2).newest().path.name == "batch_1"


def test_shards_that_are_missing_are_told_by_rank_and_host(ranks):
    for rank in ranks:
        for sentence in rank["lost"]:
            assert "must hold the shards of all 2 ranks, " in sentence
            assert f"/lost lacks those of rank 1 on {HOST}: give an --output-dir" in sentence


def test_a_disk_that_is_full_when_the_run_begins_does_not_end_it(ranks):
    assert [rank["full"] for rank in ranks] == [("", 0)] * 2


def test_rank_0_s_clock_decides_for_all_at_which_batch_they_save(ranks):
    assert [rank["timed"] for rank in ranks] == [[-1, -1, 3, 3, 5]] * 2


def test_a_save_that_is_due_while_one_is_written_waits_for_a_later_batch_on_all_ranks(ranks, root):
    """Batch 4's is left out once; batch 5 makes up for it, 6 is due again, the last one waits."""
    for rank in ranks:
        seen, last, failed = rank["crowded"]
        assert seen == [(-1, 0), (2, 0), (2, 0), (2, 1), (5, 1), (6, 1)]
        assert (last, failed) == (9, 0)
    assert (root / "crowded" / "checkpoints" / "batch_9").is_dir()
