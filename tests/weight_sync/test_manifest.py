"""Only exactly the parameters of the worker's model are accepted."""

import json

import pytest
import torch
from safetensors.torch import save_file

from async_grpo.errors import ModelError, WeightSyncError
from async_grpo.types import TensorMeta
from async_grpo.weight_sync.manifest import ExpectedWeights, read_expected

EXPECTED = ExpectedWeights(
    shapes={"embed.weight": (8, 4), "norm.weight": (4,)}, dtype="float32", tied_head=True
)


def meta(name="norm.weight", dtype="float32", shape=(4,)):
    return TensorMeta(name, dtype, shape, 0)


def test_a_parameter_that_the_model_lacks_is_named():
    with pytest.raises(WeightSyncError, match=r"'layers.9.weight' which it lacks: give worker"):
        EXPECTED.check([meta(), meta("layers.9.weight"), meta("layers.10.weight")])


def test_a_wrong_shape_is_named_with_both_shapes():
    with pytest.raises(WeightSyncError, match=r"'norm.weight'.*\(4,\).*got \(5,\)"):
        EXPECTED.check([meta(shape=(5,))])


def test_a_lower_precision_than_the_models_is_refused_and_a_higher_one_taken():
    with pytest.raises(WeightSyncError, match="bfloat16"):
        EXPECTED.check([meta(dtype="bfloat16")])
    ExpectedWeights(EXPECTED.shapes, dtype="bfloat16", tied_head=True).check([meta()])


def test_the_first_missing_parameter_is_named_and_counted():
    with pytest.raises(
        WeightSyncError, match=r"all 2 .* 1 are missing, the first is 'norm.weight'"
    ):
        EXPECTED.check_complete({"embed.weight"})
    EXPECTED.check_complete({"embed.weight", "norm.weight"})


def test_a_tied_head_may_be_sent_and_need_not():
    EXPECTED.check([meta("lm_head.weight", shape=(8, 4))])
    untied = ExpectedWeights(EXPECTED.shapes, dtype="float32", tied_head=False)
    with pytest.raises(WeightSyncError, match="lm_head"):
        untied.check([meta("lm_head.weight", shape=(8, 4))])


@pytest.fixture
def tensors():
    return {
        "embed.weight": torch.zeros(8, 4, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros(8, 4),
        "norm.weight": torch.zeros(4),
        "layers.0.rotary_emb.inv_freq": torch.zeros(2),
    }


@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_the_checkpoint(tmp_path, tensors, tied):
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({"other.layout": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    found = read_expected(str(tmp_path), dtype="float32", tied_head=tied)
    head = {} if tied else {"lm_head.weight": (8, 4)}
    assert found.shapes == {**EXPECTED.shapes, **head}


def test_a_checkpoint_in_parts_is_read_whole(tmp_path, tensors):
    parts = {name: f"model-{i}.safetensors" for i, name in enumerate(tensors)}
    for name, file in parts.items():
        save_file({name: tensors[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    found = read_expected(str(tmp_path), dtype="float32", tied_head=True)
    assert found.shapes == EXPECTED.shapes


def test_a_torch_checkpoint_is_read_too(tmp_path, tensors):
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    found = read_expected(str(tmp_path), dtype="float32", tied_head=True)
    assert found.shapes == EXPECTED.shapes


def test_a_folder_without_weights_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ModelError, match=str(tmp_path)):
        read_expected(str(tmp_path), dtype="float32", tied_head=True)
