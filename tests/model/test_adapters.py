"""An adapter is peft's: its values, its merged weights, its files; what cannot work is refused."""

import pytest
from adapted_models import KINDS, adapted
from oracle import tiny_model
from peft.tuners.lora import LoraLayer

from async_grpo.model.adapters import (
    changed,
    served,
)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_that_peft_merges(kind):
    policy = adapted(tiny_model(tied=True), **KINDS[kind])
    mine = {name: each.make() for name, each in served(policy).items()}
    assert mine.keys() == dict(tiny_model(tied=True).named_parameters()).keys()
    for module in policy.model.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    theirs = {}
    for name, parameter in policy.model.named_parameters():
        if "lora_" not in name and "original_module" not in name:
            own = name.replace(".base_layer", "").replace(".modules_to_save.default", "")
            theirs[own] = parameter
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert (value - theirs[name]).abs().max() <= 1e-6, name


def test_only_what_the_adapter_changes_is_sent():
    policy = adapted(tiny_model(tied=True), **KINDS["norms too"])
    names = {name for name in served(policy) if "k_proj" in name or "norm." in name}
    assert changed(policy).keys() == names
