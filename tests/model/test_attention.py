"""Packed attention against the formula, one sequence at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import family_config

from async_grpo.model import attention, loading
from async_grpo.model.attention import choose_attention, packed_attention
from async_grpo.types.prefixes import places_of
from async_grpo.util.errors import UnfitModel

HEADS, KV_HEADS, SIZE = 4, 2, 8


def formula(query, key, value, *, window=None, softcap=None, sinks=None):
    """softmax(q k / sqrt(d)) v with a causal mask, for [heads, L, D]; scores may be capped.

    Sinks [heads] are one more term of each denominator.
    """
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (key, value))
    scores = query @ key.transpose(1, 2) * SIZE**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(query.shape[1])[:, None] - torch.arange(query.shape[1])[None]
    visible = (distance >= 0) & (distance < (window or query.shape[1]))
    parts = scores.masked_fill(~visible, -torch.inf).exp()
    drained = 0 if sinks is None else sinks.exp()[:, None, None]
    return parts / (parts.sum(-1, keepdim=True) + drained) @ value


def random_row(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, heads, num_tokens, SIZE, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def attend(tensors, lengths, **kwargs):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    output, _ = packed_attention(
        torch.nn.Identity(),
        *tensors,
        None,
        scaling=SIZE**-0.5,
        cu_seq_lens_q=cu_seqlens,
        max_length_q=max(lengths),
        **kwargs,
    )
    return output[0].transpose(0, 1)  # [A, T, D]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 6),
    softcap=st.sampled_from([None, 1.5]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_sequence_attends_as_if_alone(lengths, window, softcap, has_sinks, seed):
    row = [tensor.requires_grad_() for tensor in random_row(sum(lengths), seed)]
    sinks = random_row(HEADS, seed + 1)[0][0, :, 0, 0].requires_grad_() if has_sinks else None
    got = attend(row, lengths, sliding_window=window, softcap=softcap, s_aux=sinks)
    parts = zip(*(tensor[0].split(lengths, dim=1) for tensor in row), strict=True)
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    expected = torch.cat([formula(*part, **options) for part in parts], dim=1)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    leaves = [*row, sinks] if has_sinks else row
    grads = [torch.autograd.grad(x.sin().sum(), leaves, retain_graph=True) for x in (got, expected)]
    for got_grad, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(got_grad, expected_grad, rtol=1e-12, atol=1e-12)


def indices(sequences):
    """(places in the row of all tokens of the sequences, and which of these are there first)."""
    places = np.concatenate(places_of([np.array(each) for each in sequences]))
    return [torch.from_numpy(each) for each in (places, np.unique(places, return_index=True)[1])]


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=6),
    is_trie=st.booleans(),
    gathers_again=st.booleans(),
    window=st.none() | st.integers(1, 6),
    softcap=st.sampled_from([None, 1.5]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_shared_token_attends_as_in_whole_sequences(
    sequences, is_trie, gathers_again, window, softcap, has_sinks, seed
):
    """Where no trie is announced, by the same bits: then all tokens of whole sequences ask."""
    repeat, first = indices(sequences)
    row = [tensor.requires_grad_() for tensor in random_row(len(first), seed)]
    sinks = random_row(HEADS, seed + 1)[0][0, :, 0, 0].requires_grad_() if has_sinks else None
    options = {"sliding_window": window, "softcap": softcap, "s_aux": sinks}
    lengths = list(map(len, sequences))
    whole = [tensor.index_select(2, repeat) for tensor in row]
    expected = attend(whole, lengths, **options)[:, first]
    places = {"repeat_index": repeat, "first_index": first}
    how = {"is_trie": is_trie, "gathers_again": gathers_again}
    got = attend(row, lengths, **options, **places, **how)
    assert is_trie or torch.equal(got, expected)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    leaves = [*row, sinks] if has_sinks else row
    grads = [torch.autograd.grad(x.sin().sum(), leaves, retain_graph=True) for x in (got, expected)]
    for got_grad, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(got_grad, expected_grad, rtol=1e-11, atol=1e-11)


def test_a_row_without_boundaries_is_one_sequence():
    row = random_row(6, seed=1)
    output, _ = packed_attention(torch.nn.Identity(), *row, None, scaling=SIZE**-0.5)
    torch.testing.assert_close(output[0].transpose(0, 1), formula(*(x[0] for x in row)))


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"dropout": 0.1}, r"dropout=0.1 options=\[\]"),
        ({"alibi": torch.zeros(HEADS), "learned_bias": 0}, r"options=\['alibi', 'learned_bias'\]"),
    ],
)
def test_what_it_cannot_reproduce_is_refused(kwargs, told):
    with pytest.raises(ValueError, match=f"without mask or dropout, .* {told}: use"):
        attend(random_row(3, seed=0), [3], **kwargs)


def test_options_without_a_value_or_an_effect_are_taken():
    row, ids = random_row(3, seed=0), torch.arange(3)[None]
    given = attend(row, [3], s_aux=None, position_ids=ids, use_cache=False, max_length_k=3)
    assert torch.equal(given, attend(row, [3]))


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("wanted", ["auto", "packed"])
def test_a_cpu_and_full_precision_pack_with_our_own_attention(wanted):
    assert choose_attention(CPU, wanted=wanted) == "packed"
    assert choose_attention(CUDA, dtype=torch.float32, wanted=wanted) == "packed"


@pytest.fixture
def device(monkeypatch):
    """A CUDA device by its answers: {"major": its compute capability, "installed": packages}."""
    has = {"major": 9, "installed": {"flash_attn_interface"}, "activated": []}
    attention.activate_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (has["major"], 0))
    monkeypatch.setattr(
        attention, "find_spec", lambda name: name if name in has["installed"] else None
    )
    monkeypatch.setattr(
        attention, "is_flash_attn_2_available", lambda: "flash_attn" in has["installed"]
    )
    monkeypatch.setattr(attention, "has_distribution", lambda name: name in has["installed"])
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", has["activated"].append)
    yield has
    attention.activate_flash.cache_clear()


def test_flash_attention_3_serves_packed_rows_where_it_is_installed(device):
    assert choose_attention(CUDA) == choose_attention(CUDA) == "packed"
    assert device["activated"] == ["FA3"]


def test_flash_attention_4_serves_where_the_third_cannot(device, monkeypatch, caplog):
    device.update(major=10, installed={"flash-attn-4", "flash_attn_interface"})
    assert choose_attention(CUDA) == "packed"
    assert device["activated"] == ["FA4"]
    attention.activate_flash.cache_clear()

    def activate(name):
        if name == "FA3":
            raise RuntimeError("it was made for another torch")
        device["activated"].append(name)

    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activate)
    device.update(major=9, activated=[])
    assert choose_attention(CUDA) == "packed"
    assert device["activated"] == ["FA4"] and "FA3 is installed but cannot be used" in caplog.text


def test_torch_knows_the_kernels_by_these_names():
    from torch.nn.attention import list_flash_attention_impls

    assert {*attention.FLASH} == {*list_flash_attention_impls()}


def test_kernels_that_the_probe_does_not_let_pass_are_done_without(monkeypatch, caplog):
    faults, dropped = iter(["is off by 0.3 nats", ""]), []
    monkeypatch.setattr(loading, "_fault", lambda *given, alone: next(faults))
    monkeypatch.setattr(loading, "flash_in_use", lambda: "" if dropped else "FA4")
    monkeypatch.setattr(loading, "drop_flash", lambda: dropped.append(1))
    assert loading.check_packing(family_config("llama"), "a-folder") is False
    assert dropped and "is off by 0.3 nats with attention by FA4: torch's own" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        ("packed", {}),
        ("auto", {"major": 10}),
        ("auto", {"major": 8}),
        ("auto", {"installed": set()}),
    ],
)
def test_otherwise_the_kernel_is_torch_s_own(device, wanted, changes):
    device.update(changes)
    assert choose_attention(CUDA, wanted=wanted) == "packed"
    assert device["activated"] == []


def test_a_flash_attention_3_that_cannot_be_used_is_told_and_done_without(
    device, monkeypatch, caplog
):
    def fail(name):
        raise RuntimeError("Module 'flash_attn_interface' does not expose FA3 kernels")

    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", fail)
    assert choose_attention(CUDA) == "packed"
    assert "cannot be used: Module 'flash_attn_interface' does not expose" in caplog.text


def test_flash_attention_2_is_used_where_it_is_installed_and_refused_by_name_elsewhere(device):
    with pytest.raises(UnfitModel, match=r"got cuda, .* flash-attn not installed: use --att"):
        choose_attention(CUDA, wanted="flash_attention_2")
    device["installed"].add("flash_attn")
    assert choose_attention(CUDA, wanted="flash_attention_2") == "flash_attention_2"
    with pytest.raises(UnfitModel, match=r"needs a CUDA device, .*, got cpu"):
        choose_attention(CPU, wanted="flash_attention_2")
    with pytest.raises(UnfitModel, match=r"needs a CUDA device, .*, got cuda, torch.float32"):
        choose_attention(CUDA, dtype=torch.float32, wanted="flash_attention_2")
