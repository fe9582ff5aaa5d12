"""Policy, moments and random states through shards on disk, for one world size and for another."""

import pickletools

import pytest
import torch
from checkpoint_scenarios import LIBRARY, SAVES, load_all, save_all
from effort import FULL
from ranks import run_ranks
from safetensors import safe_open

SAVED_BY = 2
WORLDS = (1, 2, 3, 4) if FULL else (1, 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(root, tmp_path_factory):
    """By rank: ({name: (state, next random numbers)}, the error of a failed save)."""
    folder = tmp_path_factory.mktemp("save")
    return run_ranks(save_all, num_ranks=SAVED_BY, folder=folder, root=str(root))


@pytest.fixture(scope="module")
def loaded(saved, root, tmp_path_factory):
    """The same by world size, loaded."""
    return {
        world: run_ranks(
            load_all,
            num_ranks=world,
            folder=tmp_path_factory.mktemp(f"load{world}"),
            root=str(root),
            saved_by=SAVED_BY,
        )
        for world in WORLDS
    }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SAVES)
def test_any_number_of_ranks_loads_the_very_bits(saved, loaded, name, world):
    """Also of what is sharded unevenly, and of parameters of which a rank has nothing."""
    expected, _ = saved[0][0][name]
    assert sum(key.startswith("exp_avg_sq.") for key in expected) in (0, 26, 27)
    for states, _ in loaded[world]:
        found, _ = states[name]
        assert found.keys() == expected.keys()
        assert found.pop("steps") == expected["steps"]
        assert not [key for key in found if not torch.equal(found[key], expected[key])]


@pytest.mark.parametrize("optim", LIBRARY)
def test_each_rank_loads_its_own_moments_in_8_bits_and_other_numbers_of_ranks_none(
    saved, loaded, optim
):
    for (before, _), (after, _) in zip(saved, loaded[SAVED_BY], strict=True):
        (moments, stepped), (found, stepped_later) = before[optim], after[optim]
        assert moments.keys() == found.keys() and stepped.keys() == stepped_later.keys()
        assert {each.dtype for each in moments.values()} == (
            {torch.uint8, torch.float32} if optim.endswith("8bit") else {torch.float32}
        )
        assert all(torch.equal(found[name], each) for name, each in moments.items())
        assert all(torch.equal(stepped_later[name], each) for name, each in stepped.items())
    assert f"resume it with {SAVED_BY} ranks" in loaded[1][0][0][optim]


def test_a_run_whose_steps_were_all_skipped_has_no_moments_yet(loaded):
    (states, _), *_ = loaded[1]
    found, _ = states["untrained"]
    assert not any(key.startswith("exp_avg") for key in found)


def test_random_states_come_back_to_their_ranks(saved, loaded):
    numbers = [states["tied"][1] for states, _ in loaded[SAVED_BY]]
    assert not torch.equal(*numbers)
    for (states, _), found in zip(saved, numbers, strict=True):
        assert torch.equal(found, states["tied"][1])


def test_shards_are_safetensors_under_hugging_face_names_and_nothing_is_pickled(saved, root):
    files = sorted(path for path in (root / "tied").iterdir() if path.is_file())
    assert len(files) == SAVED_BY and all(path.suffix == ".safetensors" for path in files)
    names = set()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
        with pytest.raises(ValueError):
            list(pickletools.genops(file.read_bytes()))
    assert {"policy.model.embed_tokens.weight", "exp_avg.model.norm.weight"} <= names
    assert {f"rank_{rank}.random_cpu" for rank in range(SAVED_BY)} <= names


def test_a_rank_that_cannot_read_fails_all_ranks_with_one_sentence(loaded):
    told = [sentence for _, sentence in loaded[SAVED_BY]]
    assert all("could not be read: rank 1: " in sentence for sentence in told)
    assert all("\n" not in sentence for sentence in told)


def test_a_rank_that_cannot_write_fails_all_ranks_with_one_sentence(saved):
    told = [sentence for _, sentence in saved]
    assert all("could not be written: rank 1: " in sentence for sentence in told)
    assert all("\n" not in sentence for sentence in told)
