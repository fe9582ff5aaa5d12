import os

import pytest
import torch
from safetensors.torch import save_file

from async_grpo.model.model_folder import check_files
from async_grpo.util.errors import UnfitModel


@pytest.fixture
def weights(tmp_path):
    """The weights' file of a folder that is good so far."""
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    check_files(tmp_path)
    return file


def test_weights_that_were_cut_off_are_refused_by_name(weights):
    os.truncate(weights, weights.stat().st_size - 1)
    sentence = f"{weights} must be a whole safetensors file, but: .* not fully covered: fetch it"
    with pytest.raises(UnfitModel, match=sentence):
        check_files(weights.parent)


@pytest.mark.parametrize("kept", [0, 7, 8, 20])
def test_weights_without_their_header_are_refused_by_name(weights, kept):
    os.truncate(weights, kept)
    with pytest.raises(
        UnfitModel, match=f"{weights} must be a whole safetensors file, but: .* header"
    ):
        check_files(weights.parent)


def test_a_page_that_was_saved_in_place_of_weights_is_refused_by_name(weights):
    weights.write_text("<!DOCTYPE html><title>Not found</title>")
    with pytest.raises(UnfitModel, match=f"{weights} must be a whole safetensors file"):
        check_files(weights.parent)
