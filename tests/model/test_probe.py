"""Attention that does not do what it is told is found before training."""

import pytest
import torch
from model_families import family_config
from transformers import AttentionInterface

from async_grpo.model.attention import packed_attention
from async_grpo.model.loading import check_packing, small_model
from async_grpo.util.errors import UnfitModel


def forgetting(**changes):
    """Packed attention that some options never reach."""

    def attend(module, query, key, value, mask, **kwargs):
        return packed_attention(module, query, key, value, mask, **(kwargs | changes))

    return attend


BROKEN = {
    "windows": ("mistral", forgetting(sliding_window=None)),
    "softcaps": ("gemma2", forgetting(softcap=None)),
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
    """Sinks, as gpt-oss has them."""
    AttentionInterface.register("with_sinks", forgetting(s_aux=torch.zeros(4)))
    with pytest.raises(UnfitModel, match=r"in /m \(qwen3\) raises .*options=\['s_aux'\]"):
        check_packing(family_config("qwen3"), "/m", attention="with_sinks")


def test_a_layer_of_each_kind_is_asked_and_no_global_random_number_is_used():
    config = family_config("gemma3_text", num_hidden_layers=6, layer_types=KINDS)
    state = torch.get_rng_state()
    layers = small_model(config).model.layers
    assert torch.equal(torch.get_rng_state(), state)
    assert [layer.self_attn.layer_type for layer in layers] == [KINDS[i] for i in (0, 1, 3)]
    assert config.num_hidden_layers == 6
    assert all(parameter.count_nonzero() for parameter in layers.parameters())


KINDS = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
