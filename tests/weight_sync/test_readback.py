"""A parameter that was not loaded is told, by what the live model computes with."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import samples_of
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from async_grpo.types import WeightSample
from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync import update_checks as readback
from async_grpo.weight_sync.update_checks import (
    NUM_READ,
    ExpectedWeights,
    Readback,
    check_samples,
    pack_samples,
    unpack_samples,
)
from async_grpo.weight_sync.vllm_extension import StagedFileEngine

HIDDEN, VOCABULARY, PADDED = 24, 50, 64
SIZES = {"q_proj": 32, "k_proj": 16, "v_proj": 16}


def weights(seed, dtype=torch.float32):
    """What a trainer publishes."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    published = {
        "model.embed.weight": tensor(VOCABULARY, HIDDEN),
        "model.norm.weight": tensor(HIDDEN),
    }
    for part, size in SIZES.items():
        published[f"model.attn.{part}.weight"] = tensor(size, HIDDEN)
        published[f"model.attn.{part}.bias"] = tensor(size)
    return published | {"model.attn.o_proj.weight": tensor(HIDDEN, 32)}


class Layer(nn.Module):
    """As vLLM's: rows of several parameters, or a share of the columns; packed, it keeps none."""

    def __init__(self, weight, bias=None, **facts):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        vars(self).update(facts)

    def pack(self):
        packed = self.weight.detach().clone()
        self.cpu_linear = lambda x, weight, bias: x @ packed.T
        self.weight = nn.Parameter(packed.new_empty(0), requires_grad=False)


def live(published, *, rank=0, size=1, packed=False):
    """The model that one of `size` processes serves."""

    def rows(name):
        return published[name].chunk(size)[rank]

    def merged(attribute):
        return torch.cat([rows(f"model.attn.{part}.{attribute}") for part in SIZES])

    share = PADDED // size
    start, stop = min(rank * share, VOCABULARY), min((rank + 1) * share, VOCABULARY)
    embedding = torch.zeros(share, HIDDEN, dtype=merged("bias").dtype)
    embedding[: stop - start] = published["model.embed.weight"][start:stop]
    parallel = {"tp_rank": rank, "tp_size": size}
    vocabulary = parallel | {
        "shard_indices": SimpleNamespace(
            org_vocab_start_index=start, org_vocab_end_index=stop, num_org_elements=stop - start
        ),
        "output_partition_sizes": [share],
        "input_size_per_partition": HIDDEN,
    }
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": list(SIZES)}
    model.model = nn.Module()
    model.model.embed = Layer(embedding, **vocabulary)
    model.model.norm = Layer(published["model.norm.weight"].clone())
    model.model.attn = nn.Module()
    model.model.attn.qkv_proj = Layer(
        merged("weight"),
        merged("bias"),
        output_partition_sizes=[number // size for number in SIZES.values()],
        input_size_per_partition=HIDDEN,
        **parallel,
    )
    model.model.attn.o_proj = Layer(
        published["model.attn.o_proj.weight"].chunk(size, dim=1)[rank].clone(),
        output_partition_sizes=[HIDDEN],
        input_size_per_partition=32 // size,
        **parallel,
    )
    model.lm_head = Layer(torch.empty(0), **vocabulary)
    model.lm_head.weight = model.model.embed.weight  # tied
    if packed:
        model.lm_head.pack()
        model.lm_head.weight = model.model.embed.weight
        model.model.attn.qkv_proj.pack()
        model.model.attn.o_proj.pack()
    return model


def read(sent, held, *, seed=0, **options):
    """What a live model that holds `held` says of an update by `sent`."""
    reading = Readback(live(held, **options), seed=seed)
    assert dict(reading.through(sent.items())).keys() == sent.keys()
    return reading.differing(), reading.unread


WAYS = [{}, {"packed": True}, *({"rank": rank, "size": 2} for rank in range(2))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", WAYS)
def test_what_was_loaded_reads_back_and_each_stale_parameter_is_told(options, dtype):
    sent, old = weights(1, dtype), weights(2, dtype)
    assert read(sent, sent, **options) == ([], [])
    for name in sent:
        differing, _ = read(sent, sent | {name: old[name]}, **options)
        assert set(differing) == {name}


def test_parameters_of_higher_precision_are_compared_as_the_engine_rounds_them():
    sent = weights(1)
    rounded = {name: tensor.bfloat16() for name, tensor in sent.items()}
    assert read(sent, rounded) == ([], [])


def test_one_number_in_a_row_that_is_read_is_enough_and_every_row_has_its_turn(monkeypatch):
    monkeypatch.setattr(readback, "LEAST_NUMBERS", 0)  # as of matrices that are larger
    sent = weights(1)
    name = "model.attn.q_proj.weight"
    changed = sent | {name: sent[name].clone()}
    changed[name][5, 3] += 1e-6
    told = [read(sent, changed, seed=seed)[0] == [name] for seed in range(40)]
    assert 0.3 < sum(told) / len(told) < 0.7, f"{NUM_READ} of 32 rows are read at a time"


def test_a_tied_head_that_multiplies_by_its_old_copy_is_told():
    sent, old = weights(1), weights(2)
    model = live(sent, packed=True)
    model.lm_head.cpu_linear = live(old, packed=True).lm_head.cpu_linear
    reading = Readback(model, seed=0)
    list(reading.through(sent.items()))
    assert reading.differing() == ["model.embed.weight"]


def told_by_samples(sent, held, **options):
    reading = Readback(live(held, **options), seed=0)
    packed = pack_samples(samples_of(sent.items()))
    shapes = {name: tuple(tensor.shape) for name, tensor in sent.items()}
    return reading.differing_samples(unpack_samples(packed), shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_samples_of_the_trainer_tell_of_each_parameter_that_differs(packed, dtype):
    sent, old = weights(1), weights(2)
    right = {name: tensor.to(dtype) for name, tensor in sent.items()}
    assert told_by_samples(sent, right, packed=packed) == {}
    for name, tensor in sent.items():
        counts = told_by_samples(sent, right | {name: old[name].to(dtype)}, packed=packed)
        places = 2 if "embed" in name else 1  # the head is tied
        assert counts == {name: 5**tensor.ndim * places}
    checked = dict.fromkeys(sent, 25)
    with pytest.raises(WeightSyncError, match=r"samples of 9 tensors differ, 25 of 'model\.attn"):
        check_samples(checked)


def test_each_process_checks_the_samples_of_its_own_shard_and_together_they_check_all():
    sent, old = weights(1), weights(2)
    for name in sent:
        told = [
            told_by_samples(sent, sent | {name: old[name]}, rank=rank, size=2) for rank in range(2)
        ]
        held_by_all = name == "model.norm.weight"
        number = sum(each[name] for each in told) / (2 if held_by_all else 1)
        assert number == told_by_samples(sent, sent | {name: old[name]})[name]


def test_a_sample_of_a_parameter_that_no_model_has_is_told():
    shapes = {}
    samples = samples_of([("model.layers.9.weight", torch.ones(7, 7))])
    reading = Readback(live(weights(1)), seed=0)
    assert reading.differing_samples(samples, shapes) == {"model.layers.9.weight": 25}


def test_samples_of_experts_are_counted_over_all_of_them():
    experts = Layer(torch.arange(24.0).view(2, 3, 4))
    place = readback._Place(experts, "weight", 0, 2, is_packed=False)
    rows, columns = readback._indices((2, 3, 4), place)
    sample = WeightSample("w", np.array([4, 1]), np.array([3]), np.float32([[19], [7]]))
    assert readback._num_differing(place, sample, rows, columns) == 0
    assert (
        readback._num_differing(place, sample._replace(rows=np.array([1, 4])), rows, columns) == 2
    )


def test_what_vllm_holds_otherwise_is_left_out_by_name():
    sent = weights(1)
    model = live(sent)
    model.model.attn.o_proj.weight = nn.Parameter(
        sent["model.attn.o_proj.weight"].to(torch.float8_e4m3fn), requires_grad=False
    )
    reading = Readback(model, seed=0)
    list(reading.through((sent | {"of.nobody": torch.zeros(3)}).items()))
    assert reading.unread == ["model.attn.o_proj.weight", "of.nobody"]
    assert reading.differing() == []


def test_what_differs_from_the_first_update_on_is_held_otherwise_and_later_ones_are_stale():
    engine = object.__new__(StagedFileEngine)
    engine._loaded = None

    def update(*differing):
        engine._readback = SimpleNamespace(differing=lambda: differing, unread=["of.nobody"])
        engine._check_loaded()

    update("packed")
    assert engine.unreadable == {"packed", "of.nobody"}
    update("packed")
    with pytest.raises(WeightSyncError, match=r"1 parameters read back .* such as 'missed'"):
        update("packed", "missed")


def test_a_matrix_that_is_written_past_the_loaders_is_told_before_the_old_one_serves_on():
    engine = object.__new__(StagedFileEngine)
    engine.model, engine._matrices = nn.ModuleDict({"experts": nn.Linear(2, 2)}), ["experts.weight"]
    info = get_layerwise_info(engine.model["experts"])
    info.load_numel_total, info.load_numel = 4, 4
    engine._check_received()
    info.load_numel = 0
    with pytest.raises(WeightSyncError, match=r"it wrote 1 past them, such as 'experts\.weight'"):
        engine._check_received()


@pytest.mark.parametrize("has_files", [True, False])
def test_a_first_update_that_misses_a_parameter_is_told_where_the_folder_says_what_it_was(
    tmp_path, has_files
):
    old, sent = weights(1), weights(2)
    missed, packed = "model.attn.q_proj.weight", "model.norm.weight"
    if has_files:
        save_file(old, tmp_path / "model.safetensors")
    engine = object.__new__(StagedFileEngine)
    engine.model_config = SimpleNamespace(model=str(tmp_path))
    engine._expected = ExpectedWeights({name: tuple(t.shape) for name, t in old.items()}, "float32")
    engine.model = live(old | {packed: old[packed] + 1})  # vLLM's own form of it
    engine.start_weight_update()
    assert engine.unreadable == ({packed} if has_files else None)
    engine._loaded = None  # a model that does not tell
    engine._readback = Readback(live(sent | {missed: old[missed], packed: old[packed]}), seed=1)
    list(engine._readback.through(sent.items()))
    if has_files:
        with pytest.raises(WeightSyncError, match=rf"1 parameters read back .* '{missed}'"):
            engine._check_loaded()
    else:
        engine._check_loaded()
        assert engine.unreadable == {missed, packed}
