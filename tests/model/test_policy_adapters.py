"""An adapter is peft's: its values, its merged weights, its files; what cannot work is refused."""

import json

import numpy as np
import pytest
import torch
from adapted_models import KINDS, adapted
from oracle import tiny_model
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from test_experts import model_of
from tiny_families import tiny_config

from async_grpo.config.training_options import AdapterOptions
from async_grpo.model.adapters import Adapter, read_adapter_config
from async_grpo.model.served import changed, check_adapter, samples, served
from async_grpo.util.errors import ConfigError, UnfitModel


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


def test_samples_are_the_numbers_that_are_sent_of_experts_too():
    policy = adapted(model_of("qwen3_moe"), lora_rank=2).float()
    own, lost, total = samples(
        policy, alone=False, dtype=torch.float32, served=torch.bfloat16, seed=3
    )
    sent = {name: each.make() for name, each in changed(policy).items()}
    assert 0 < lost < total and {each.name for each in own} == sent.keys()
    assert any(sent[each.name].ndim == 3 for each in own)
    for each in own:
        whole = sent[each.name].flatten(0, -2)
        assert np.array_equal(whole[each.rows][:, each.columns].numpy(), each.values)


REFUSED = [
    ({"lora_targets": "lm_head"}, "linear layers but for the head, .* got lm_head"),
    ({"lora_targets": "nothing_of_that_name"}, "nothing_of_that_name.* names none that it can"),
    ({"lora_targets": "(q_proj"}, "names none that it can"),
    ({"lora_targets": "embed_tokens"}, "an adapter must be of linear layers .*embed_tokens"),
    ({"modules_to_save": "embed_tokens"}, "share no weights with others, got .*embed_tokens"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_what_an_adapter_cannot_change_is_refused(options, sentence):
    with pytest.raises(UnfitModel, match=sentence):
        adapted(tiny_model(tied=True), **({"lora_rank": 2} | options))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda"])
def test_a_start_that_alters_the_model_is_refused_by_name(init):
    with pytest.raises(ConfigError, match=f"--lora-init must leave the .*{init}.* gaussian"):
        AdapterOptions(lora_rank=2, lora_init=init)


@pytest.mark.parametrize("option", ["use_dora", "export_merged", "use_rslora"])
def test_options_of_adapters_go_with_one(option):
    with pytest.raises(ConfigError, match="goes with --lora-rank"):
        AdapterOptions(**{option: True})


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_families_whose_layers_peft_takes_are_admitted(family, tmp_path):
    tiny_config(family).save_pretrained(tmp_path)
    check_adapter(str(tmp_path), Adapter.of(AdapterOptions(lora_rank=2), model="m", seed=0))


def test_layers_that_read_weights_past_an_adapter_are_refused(tmp_path):
    tiny_config("jamba").save_pretrained(tmp_path)
    adapter = Adapter.of(AdapterOptions(lora_rank=2), model="m", seed=0)
    with pytest.raises(UnfitModel, match=r"must compute what one with merged weights .*dt_proj"):
        check_adapter(str(tmp_path), adapter)


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"peft_type": "IA3"}, "peft_type"), ({"init_lora_weights": "pissa"}, "init_lora_weights"),
     ({"bias": "all"}, "bias"), ({"layer_replication": [[0, 1]]}, "layer_replication")],
)  # fmt: skip
def test_other_adapters_do_not_go_on(changes, found, tmp_path):
    get_peft_model(tiny_model(tied=True), LoraConfig(r=2)).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UnfitModel, match=f"must be LoRA or DoRA beside .* has {found}"):
        read_adapter_config(tmp_path)


def test_dropout_of_an_adapter_is_switched_off(tmp_path):
    given = LoraConfig(r=2, lora_dropout=0.1)
    get_peft_model(tiny_model(tied=True), given).save_pretrained(tmp_path)
    assert read_adapter_config(tmp_path).lora_dropout == 0
