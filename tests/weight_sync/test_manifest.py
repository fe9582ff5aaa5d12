"""Only exactly the parameters of the worker's model are accepted."""

import pytest
from oracle import tiny_model
from safetensors.torch import load_file, save_file

from async_grpo.types import TensorMeta
from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync.update_checks import ExpectedWeights

EXPECTED = ExpectedWeights({"embed.weight": (8, 4), "norm.weight": (4,)}, dtype="float32")
EMBEDDING = TensorMeta("embed.weight", "float32", (8, 4), 0)


def meta(name="norm.weight", dtype="float32", shape=(4,)):
    return TensorMeta(name, dtype, shape, 0)


def test_the_models_parameters_are_taken_in_any_order():
    EXPECTED.check([meta(), EMBEDDING])
    EXPECTED.check([EMBEDDING, meta()])


def test_a_parameter_that_the_model_lacks_is_named():
    with pytest.raises(WeightSyncError, match=r"'layers.9.weight' which it lacks: give worker"):
        EXPECTED.check([meta(), meta("layers.9.weight"), meta("layers.10.weight")])


def test_a_wrong_shape_is_named_with_both_shapes():
    with pytest.raises(WeightSyncError, match=r"'norm.weight'.*\(4,\).*got \(5,\)"):
        EXPECTED.check([meta(shape=(5,))])


def test_a_lower_precision_than_the_models_is_refused_and_a_higher_one_taken():
    with pytest.raises(WeightSyncError, match="bfloat16"):
        EXPECTED.check([meta(dtype="bfloat16")])
    ExpectedWeights(EXPECTED.shapes, dtype="bfloat16").check([meta(), EMBEDDING])


def test_the_first_missing_parameter_is_named_and_counted():
    with pytest.raises(
        WeightSyncError, match=r"all 2 .* 1 are missing, the first is 'norm.weight'"
    ):
        EXPECTED.check([EMBEDDING])


def test_a_parameter_that_comes_twice_is_named():
    with pytest.raises(WeightSyncError, match=r"'norm.weight' must be sent once, got it twice"):
        EXPECTED.check([meta(), meta(), EMBEDDING])


@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_that_the_trainer_publishes(tmp_path, tied):
    model = tiny_model(tied=tied)
    model.save_pretrained(tmp_path)
    found = ExpectedWeights.read(str(tmp_path), dtype="float32")
    assert found.shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert ("lm_head.weight" in found.shapes) is not tied


def test_parameters_that_are_not_sent_are_to_be_in_the_folder_under_their_names(tmp_path):
    model = tiny_model(tied=True)
    model.save_pretrained(tmp_path)
    found = ExpectedWeights.read(str(tmp_path), dtype="float32")
    some = [
        TensorMeta(name, "float32", tuple(each.shape), 0)
        for name, each in model.named_parameters()
        if "q_proj" in name
    ]
    with pytest.raises(WeightSyncError, match="are missing"):
        found.check(some)
    found.check(some, rest_of=tmp_path)
    with pytest.raises(WeightSyncError, match="which it lacks"):
        found.check([*some, meta("layers.9.weight")], rest_of=tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held["renamed"] = held.pop("model.norm.weight")
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightSyncError, match=r"lacks 1 by name, such as 'model\.norm\.weight'"):
        found.check(some, rest_of=tmp_path)
