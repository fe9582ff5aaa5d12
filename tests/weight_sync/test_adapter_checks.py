"""What vLLM holds of an adapter is compared with the trainer's samples, shard by shard."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import samples_of
from vllm.lora.ops.torch_ops import lora_ops

from async_grpo.types import WeightSample
from async_grpo.weight_sync import adapter_checks
from async_grpo.weight_sync.adapter_checks import AdapterReadback

RANK, MAX_RANK, HIDDEN = 6, 8, 24
SIZES = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
NUMBER, SLOT, NUM_SLOTS = 7, 1, 3
PREFIX = "base_model.model.model.attn."


class Layer:
    """As vLLM's: memory for some adapters, of which it writes its own shard."""

    def __init__(self, sizes, width, dtype):
        slots = (NUM_SLOTS, 1)
        self.lora_a_stacked = tuple(
            torch.zeros(*slots, MAX_RANK, width, dtype=dtype) for _ in sizes
        )
        self.lora_b_stacked = tuple(torch.zeros(*slots, n, MAX_RANK, dtype=dtype) for n in sizes)

    def write(self, slot, a, b):
        for stacked, parts in ((self.lora_a_stacked, a), (self.lora_b_stacked, b)):
            for held, part in zip(stacked, parts, strict=True):
                if part is not None:
                    held[slot, 0, : part.shape[0], : part.shape[1]] = part


class Merged(Layer):
    """Several projections, of which each process has rows of B."""

    def __init__(self, rank, size, dtype):
        super().__init__([number // size for number in SIZES.values()], HIDDEN, dtype)
        self.rank, self.size = rank, size

    def set_lora(self, slot, a, b):
        own = [None if each is None else each.chunk(self.size)[self.rank] for each in b]
        self.write(slot, a, own)


class Row(Layer):
    """One projection, of which each process has columns of A."""

    def __init__(self, rank, size, dtype):
        super().__init__([HIDDEN], 32 // size, dtype)
        self.rank, self.size = rank, size

    def set_lora(self, slot, a, b):
        self.write(slot, [a.chunk(self.size, dim=1)[self.rank]], [b])


def adapter(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"o_proj": (HIDDEN, 32)} | {name: (size, HIDDEN) for name, size in SIZES.items()}
    tensors = {}
    for name, (rows, columns) in shapes.items():
        for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
            tensors[f"{PREFIX}{name}.{part}.weight"] = torch.randn(shape, generator=generator)
    return tensors


def scaling_of(config):
    root = config["r"] ** (0.5 if config["use_rslora"] else 1)
    return config["lora_alpha"] / root


def samples_of_trainer(tensors, config):
    scaling = np.float32(scaling_of(config))
    return [
        WeightSample(name, rows, columns, values * scaling if "lora_B" in name else values)
        for name, rows, columns, values in samples_of(tensors.items())
    ]


def live(tensors, config, *, dtype, rank=0, size=1):
    """What vLLM makes of an adapter's file."""
    layers = {
        "model.attn.qkv_proj": Merged(rank, size, dtype),
        "model.attn.o_proj": Row(rank, size, dtype),
    }
    rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for name in rounded:
        if "lora_B" in name:
            rounded[name] = rounded[name] * scaling_of(config)

    def of(part, names):
        return [rounded.get(f"{PREFIX}{name}.{part}.weight") for name in names]

    layers["model.attn.qkv_proj"].set_lora(SLOT, of("lora_A", SIZES), of("lora_B", SIZES))
    layers["model.attn.o_proj"].set_lora(SLOT, *of("lora_A", ["o_proj"]), *of("lora_B", ["o_proj"]))
    parts = [f"model.attn.{name}" for name in SIZES]
    return SimpleNamespace(
        model=None,
        modules=layers,
        packed_modules={"model.attn.qkv_proj": parts},
        lora_index_to_id=[None, NUMBER, None],
    )


def make_config(alpha=9, use_rslora=False):
    return {
        "r": RANK, "lora_alpha": alpha, "use_rslora": use_rslora, "target_modules": [*SIZES],
    }  # fmt: skip


def told(folder, sent, held, config, **options):
    """Tensors of which the trainer has `sent`, and vLLM `held`, which is in its folder."""
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(held, folder / "adapter_model.safetensors")
    reading = AdapterReadback(live(held, config, **options))
    return reading.differing(NUMBER, folder, samples_of_trainer(sent, make_config()))


DTYPES = [torch.float32, torch.bfloat16]
SHARDS = [{}, *({"rank": rank, "size": 2} for rank in range(2))]


@given(
    seed=st.integers(0, 1000),
    alpha=st.integers(1, 300),
    use_rslora=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    rounds=st.booleans(),
    shard=st.sampled_from(SHARDS),
)
def test_what_is_held_as_it_was_sent_is_never_told(
    tmp_path_factory, seed, alpha, use_rslora, dtype, rounds, shard
):
    """Though both sides round; `rounds`: a trainer rounds as vLLM does before it samples."""
    folder, tensors = tmp_path_factory.mktemp("adapter"), adapter(seed)
    config = make_config(alpha, use_rslora)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    samples = samples_of_trainer(tensors, config)
    if rounds:
        rounded = {name: tensor.to(dtype).float() for name, tensor in tensors.items()}
        samples = [
            sample._replace(values=torch.from_numpy(sample.values).to(dtype).float().numpy())
            for sample in samples_of_trainer(rounded, config)
        ]
    reading = AdapterReadback(live(tensors, config, dtype=dtype, **shard))
    for _ in range(2):  # with the places that it remembers, too
        assert reading.differing(NUMBER, folder, samples) == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_tensor_that_is_other_or_missing_is_told_by_some_process(tmp_path, dtype):
    sent, old = adapter(1), adapter(2)
    for name in sent:
        held = sent | {name: old[name]}
        both = [told(tmp_path, sent, held, make_config(), dtype=dtype, **s) for s in SHARDS[1:]]
        assert {each for counts in both for each in counts} == {name}
        counts = told(tmp_path, sent, held, make_config(), dtype=dtype)
        assert {*counts} == {name} and counts[name] > 20  # of 25: some round to the same
    pair = [f"{PREFIX}q_proj.lora_{part}.weight" for part in "AB"]
    less = {name: each for name, each in sent.items() if name not in pair}
    assert told(tmp_path, sent, less, make_config(), dtype=dtype) == dict.fromkeys(pair, 25)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [10, 18])
def test_a_wrong_scaling_is_told_of_every_b_and_of_no_a(tmp_path, alpha, dtype):
    sent = adapter(1)
    counts = told(tmp_path, sent, sent, make_config(alpha), dtype=dtype)
    assert {*counts} == {name for name in sent if "lora_B" in name}


def test_an_adapter_that_vllm_has_placed_nowhere_is_told_without_any_sample(tmp_path):
    sent = adapter(1)
    other = {name.replace("o_proj", "out_proj"): tensor for name, tensor in sent.items()}
    (tmp_path / "adapter_config.json").write_text(json.dumps(make_config()))
    save_file(other, tmp_path / "adapter_model.safetensors")
    counts = AdapterReadback(live(sent, make_config(), dtype=torch.float32)).differing(
        NUMBER, tmp_path, []
    )
    assert {*counts} == {name for name in other if "out_proj" in name}


def test_a_token_without_an_adapter_gets_none_once_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(lora_ops, "bgmv_shrink", lora_ops.bgmv_shrink)
    monkeypatch.setattr(adapter_checks.punica_cpu, "bgmv_shrink", lora_ops.bgmv_shrink)
    weights, rows = torch.ones(2, 1, 3, 4), torch.ones(2, 4)
    for _ in range(2):
        output = torch.zeros(2, 3)
        adapter_checks.leave_base_rows_alone()
        lora_ops.bgmv_shrink(rows, weights, output, torch.tensor([0, -1]))
        assert output.tolist() == [[4.0] * 3, [0.0] * 3]
