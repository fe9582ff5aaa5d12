"""Quantised folders of published formats become the bf16 folders that their formulas say."""

import json
import math

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from oracle import tiny_model
from safetensors.torch import load_file, save_file
from test_loading import edit, save_tokenizer
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    Mxfp4Config,
)

from async_grpo.checkpoint import dequantize, export
from async_grpo.cli.main import main
from async_grpo.model.model_folder import check_files, check_model_folder
from async_grpo.util.errors import ConfigError, UnfitModel

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


def block_quantised(weight, block, dtype=torch.float8_e4m3fn):
    """(float8, float32 scales), as DeepSeek-V3 quantises: a block's largest becomes 448."""
    rows, columns = weight.shape
    grid = torch.zeros(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    stored = torch.zeros_like(weight)
    for i in range(len(grid)):
        for j in range(len(grid[0])):
            place = (
                slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            )  # fmt: skip
            grid[i, j] = weight[place].abs().max() / 448
            stored[place] = weight[place] / grid[i, j]
    return stored.to(dtype), grid


def direct(weight, grid, block):
    """Each number times its block's scale, in float64, and rounded to bf16 once."""
    rows = torch.arange(weight.shape[0]) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return (weight.double() * grid.double()[rows][:, columns]).float().to(torch.bfloat16)


def quantise_qwen(folder, block):
    """A tiny Qwen3 whose matrices are FP8, with scales in a second file; {name: what is meant}."""
    tiny_model(tied=False, dtype=torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    weights = load_file(folder / "model.safetensors")
    stored, scales, meant = {}, {}, dict(weights)
    for name, tensor in weights.items():
        if name.endswith("_proj.weight"):
            stored[name], grid = block_quantised(tensor.float(), block)
            scales[f"{name}_scale_inv"] = grid
            meant[name] = direct(stored[name], grid, block)
    (folder / "model.safetensors").unlink()
    files = {
        "model-00001-of-00002.safetensors": weights | stored,
        "model-00002-of-00002.safetensors": scales,
    }
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    places = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    edit(folder, quantization_config=FP8 | {"weight_block_size": list(block)})
    return meant


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "tiny-FP8"
    folder.mkdir()
    return folder


def command(*arguments):
    return CliRunner().invoke(main, ["dequantize", *map(str, arguments)], catch_exceptions=False)


def loaded(folder, **options):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert not any(report.values()), report
    return model.state_dict()


@pytest.mark.parametrize("block", [(16, 16), (20, 12)], ids=["whole blocks", "blocks that are cut"])
def test_a_folder_of_fp8_blocks_becomes_the_bf16_model_of_its_formula(block, source, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)  # several files, and an index
    meant = quantise_qwen(source, block)
    with pytest.raises(UnfitModel) as refused:
        check_model_folder(str(source))
    target = source.parent / "tiny-FP8-bf16"
    assert f"run `async-grpo dequantize {source} tiny-FP8-bf16` once" in str(refused.value)
    result = command(source, target)
    assert (result.exit_code, result.output) == (
        0, f"wrote {target}: bf16, 14 weights were quantised\n",
    )  # fmt: skip
    assert check_model_folder(str(target)).tokenizer_hash  # a run takes it
    found = loaded(target)
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(found[name], tensor), name
    config = json.loads((target / "config.json").read_text())
    assert (config["dtype"], "quantization_config" in config) == ("bfloat16", False)
    places = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(places.values())) > 1
    stored = {name: load_file(target / file).keys() for name, file in places.items()}
    assert all(name in names for name, names in stored.items()) and places.keys() == meant.keys()
    if block == (16, 16):  # what transformers reads without the command
        own = loaded(source, quantization_config=FineGrainedFP8Config(dequantize=True))
        assert all(torch.equal(own[name], found[name]) for name in found)


def test_a_folder_of_mxfp4_experts_becomes_the_bf16_model_that_transformers_reads(source):
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2,
        max_position_embeddings=64, sliding_window=8, pad_token_id=None, eos_token_id=1,
    )  # fmt: skip
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    weights = load_file(source / "model.safetensors")
    plain = {*weights}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        shape = experts, rows, columns // 32
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(100, 140, shape, dtype=torch.uint8)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    edit(source, quantization_config={"quant_method": "mxfp4"})
    target = source.parent / "out"
    assert command(source, target).exit_code == 0
    assert load_file(target / "model.safetensors").keys() == plain
    found, own = loaded(target), loaded(source, quantization_config=Mxfp4Config(dequantize=True))
    assert all(torch.equal(own[name], found[name]) for name in found)
    name = "model.layers.0.mlp.experts.down_proj"
    packed, exponents = weights[f"{name}_blocks"], weights[f"{name}_scales"]
    for expert, row, column in [(0, 0, 0), (1, 5, 1), (2, 31, 62), (2, 30, 63), (1, 7, 33)]:
        group, place = divmod(column, 32)
        four = int(packed[expert, row, group, place // 2]) >> 4 * (place % 2) & 15
        value = (
            E2M1[four & 7] * (-1) ** (four >> 3) * 2.0 ** (int(exponents[expert, row, group]) - 127)
        )
        assert found[name][expert, column, row].item() == value


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9),
    block=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 9), experts=st.integers(0, 2),
)  # fmt: skip
def test_a_number_is_multiplied_by_its_own_scale(rows, columns, block, seed, experts):
    torch.manual_seed(seed)
    weight = torch.randn(max(experts, 1), rows, columns).to(torch.float8_e4m3fn)
    kinds = {
        (1, 1): (rows, columns),  # one of the tensor
        (rows, 1): (1, columns),  # one a row
        (math.ceil(rows / block[0]), math.ceil(columns / block[1])): block,
    }
    for shape, own in kinds.items():
        grid = torch.rand(max(experts, 1), *shape) + 0.1
        want = torch.stack([direct(w, g, own) for w, g in zip(weight, grid, strict=True)])
        got = dequantize.from_fp8(*(weight, grid) if experts else (weight[0], grid[0]), block=block)
        assert torch.equal(got, want if experts else want[0])


def test_scales_of_compressed_tensors_are_read_and_those_of_activations_are_not(source):
    meant = quantise_qwen(source, (16, 32))
    file = source / "model-00002-of-00002.safetensors"
    scales = {name.removesuffix("_inv"): grid for name, grid in load_file(file).items()}
    inputs = {name.replace("weight_scale", "input_scale"): torch.ones(1) for name in scales}
    save_file(scales | inputs, file, metadata={"format": "pt"})
    places = dict.fromkeys(meant, "model-00001-of-00002.safetensors")
    places |= dict.fromkeys(scales | inputs, file.name)
    edit(source, "model.safetensors.index.json", weight_map=places)
    group = {"weights": {"num_bits": 8, "type": "float", "block_structure": [16, 32]}}
    found = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    edit(source, quantization_config=found | {"config_groups": {"group_0": group}})
    dequantize.dequantize(source, source.parent / "out")
    got = loaded(source.parent / "out")
    assert got.keys() == meant.keys()
    assert all(torch.equal(got[name], meant[name]) for name in meant)


@pytest.mark.parametrize("store", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_of_one_byte_are_powers_of_two(store):
    powers = torch.tensor([[120, 127, 130]], dtype=torch.uint8)
    weight = torch.ones(2, 96).to(torch.float8_e4m3fn)
    block = dequantize.block_of({"quant_method": "mxfp8"})
    got = dequantize.from_fp8(weight[:1], powers.view(store), block=block)
    assert got[0, ::32].tolist() == [2.0**-7, 1.0, 8.0]


CONFIGS = {
    "null": ({"quant_method": "fp8", "weight_block_size": None}, (128, 128)),
    "text": ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"block_structure": "128x64"}}}}, (128, 64)),
    "list": ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"block_structure": [64, 128]}}}}, (64, 128)),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_the_block_is_the_config_s(case):
    found, block = CONFIGS[case]
    assert dequantize.block_of(found) == block


def rewritten(folder, **changes):
    file = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    first = min(tensors)
    changed = {"scale": tensors[first], **changes}["scale"]
    save_file(tensors | {first: changed}, file, metadata={"format": "pt"})


def configured(found):
    return lambda folder: edit(folder, quantization_config=found)


def scaled_by(scale):
    return lambda folder: rewritten(folder, scale=scale)


DEFECTS = {
    "nan": (scaled_by(torch.full((2, 3), torch.nan)), UnfitModel, "NaN or infinity: use the full"),
    "shape": (scaled_by(torch.ones(5, 7)), UnfitModel, r"has scales \[5, 7\] for blocks \(16, 16"),
    "gptq": (configured({"quant_method": "gptq"}), UnfitModel, "use the full-precision model"),
    "none": (configured(None), ConfigError, "is not: use it as it is"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_what_cannot_be_dequantised_is_refused_and_leaves_nothing(defect, source):
    quantise_qwen(source, (16, 16))
    spoil, error, message = DEFECTS[defect]
    spoil(source)
    check_files(source)
    with pytest.raises(error, match=message):
        dequantize.dequantize(source, source.parent / "out")
    assert [*source.parent.iterdir()] == [source]


def test_weights_without_scales_are_refused_by_name(source):
    quantise_qwen(source, (16, 16))
    index = source / "model.safetensors.index.json"
    kept = json.loads(index.read_text())
    kept["weight_map"].pop("model.layers.1.mlp.up_proj.weight_scale_inv")
    index.write_text(json.dumps(kept))
    with pytest.raises(
        UnfitModel, match=r"layers.1.mlp.up_proj.weight in .* is torch.float8_e4m3fn"
    ):
        dequantize.dequantize(source, source.parent / "out")
    assert [*source.parent.iterdir()] == [source]


def test_a_folder_that_is_there_is_not_replaced(source):
    quantise_qwen(source, (16, 16))
    target = source.parent / "out"
    target.mkdir()
    (target / "mine").touch()
    result = command(source, target)
    assert result.exit_code == 1 and f"OUT must not exist, {target} does" in result.stderr
    assert (target / "mine").exists()
