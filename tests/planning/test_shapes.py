"""Sizes from configs equal those that were published, and those of the real modules."""

import pytest
import torch
from adapted_models import KINDS, adapted
from oracle import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from async_grpo.cli.memory import read_positions, read_shape
from async_grpo.config.training_options import AdapterOptions
from async_grpo.model.policy import PolicyModel, model_shape, size_of
from async_grpo.planning.asked import (
    PUBLISHED,
    multiplied,
    published_config,
    shape_of_config,
    trained_of,
)
from async_grpo.util.errors import UnfitModel

TINY = "sample-data/tiny-countdown"


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
    ],
)
def test_published_names_have_as_many_parameters_as_were_published(name, num_parameters):
    config = published_config(name)
    assert shape_of_config(config, who=name).num_parameters == num_parameters
    assert read_shape(name).num_parameters == num_parameters


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-0.6b", "llama-3.1-8b"])
def test_sizes_are_those_of_the_modules(name):
    sizes = {key: value for key, value in PUBLISHED[name].items() if value is not None}
    kind = sizes.pop("model_type")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
        expected = model_shape(PolicyModel(model))
    shape = shape_of_config(PUBLISHED[name], who=name)
    assert shape == expected
    assert multiplied(shape) == pytest.approx(size_of(model).num_parameters, rel=1e-5)


def test_a_folder_s_sizes_are_those_of_its_model():
    with torch.device("meta"):
        policy = PolicyModel(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY)))
    assert read_shape(TINY) == model_shape(policy)
    assert read_positions(TINY) == 512


def test_a_model_that_is_nowhere_is_refused_with_the_nearest_name():
    with pytest.raises(UnfitModel, match=r"nearest is qwen2.5-7b\): fetch it, or .* --shape-of"):
        read_shape("acme/Qwen2.5-7C")
    assert read_shape("acme/Qwen2.5-7C", instead=TINY) == read_shape(TINY)


def test_a_config_without_layers_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_attention_heads": 2}')
    with pytest.raises(UnfitModel, match="must say num_hidden_layers"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("kind", [each for each in KINDS if each != "norms too"])
def test_what_an_adapter_trains_is_what_peft_injects(kind):
    policy, options = adapted(tiny_model(tied=True), **KINDS[kind]), AdapterOptions(**KINDS[kind])
    shape = model_shape(policy)
    assert trained_of(shape, options.stated, 4) == shape.trained
