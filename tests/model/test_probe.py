"""Attention that does not do what it is told is found before training."""

import pytest
import torch
from model_families import family_config, family_model
from transformers import AttentionInterface

from async_grpo.model.attention import packed_attention
from async_grpo.model.loading import check_packing, small_model
from async_grpo.model.policy import size_of
from async_grpo.util.errors import UnfitModel


def forgetting(**changes):
    """Packed attention that some options never reach."""

    def attend(module, query, key, value, mask, **kwargs):
        return packed_attention(module, query, key, value, mask, **(kwargs | changes))

    return attend


BROKEN = {
    "windows": ("mistral", forgetting(sliding_window=None)),
    "softcaps": ("gemma2", forgetting(softcap=None)),
    "sinks": ("granite_swa", forgetting(s_aux=None)),
    "scales": ("granite", forgetting(scaling=None)),
    "borders": ("qwen3", forgetting(cu_seq_lens_q=None)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forgotten", BROKEN)
def test_attention_that_forgets_is_refused(forgotten, dtype):
    family, broken = BROKEN[forgotten]
    AttentionInterface.register("forgetful", broken)
    config = family_config(family)
    check_packing(config, family, dtype=dtype)
    with pytest.raises(
        UnfitModel, match=f"forgetful attention in {family} .* is off by .* --atten"
    ):
        check_packing(config, family, attention="forgetful", dtype=dtype)


def test_what_an_attention_refuses_is_told_with_the_model(monkeypatch):
    AttentionInterface.register("with_bias", forgetting(position_bias=torch.zeros(4)))
    with pytest.raises(UnfitModel, match=r"in /m \(qwen3\) raises .*options=\['position_bias'\]"):
        check_packing(family_config("qwen3"), "/m", attention="with_bias")


def test_a_layer_of_each_kind_is_asked_and_no_global_random_number_is_used():
    config = family_config("gemma3_text", num_hidden_layers=6, layer_types=KINDS)
    state = torch.get_rng_state()
    layers = small_model(config).model.layers
    assert torch.equal(torch.get_rng_state(), state)
    assert [layer.self_attn.layer_type for layer in layers] == [KINDS[i] for i in (0, 1, 3)]
    assert config.num_hidden_layers == 6
    assert all(parameter.count_nonzero() for parameter in layers.parameters())


KINDS = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2


def test_layers_that_share_keys_are_asked_beside_those_that_do_not():
    kinds = [*KINDS[:5], "full_attention"]
    config = family_config("gemma4_text", num_hidden_layers=6, layer_types=kinds)
    layers = small_model(config).model.layers
    assert [layer.self_attn.is_kv_shared_layer for layer in layers] == [False] * 3 + [True] * 2
    assert [layer.self_attn.head_dim for layer in layers] == [8, 8, 16, 8, 16]
    assert size_of(family_model("gemma4_text", attention="eager")).attention_width == 32
