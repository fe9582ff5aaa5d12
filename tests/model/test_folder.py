import json
import os
import time

import pytest
import torch
from safetensors.torch import save_file

from async_grpo.model.foreign_folders import check_full_precision, check_sampled
from async_grpo.model.model_folder import check_files
from async_grpo.util.errors import UnfitModel


@pytest.fixture
def weights(tmp_path):
    """The weights' file of a folder that is good so far."""
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    check_files(tmp_path)
    return file


def test_weights_that_were_cut_off_are_refused_by_name(weights):
    os.truncate(weights, weights.stat().st_size - 1)
    sentence = f"{weights} must be a whole safetensors file, but: .* not fully covered: fetch it"
    with pytest.raises(UnfitModel, match=sentence):
        check_files(weights.parent)


@pytest.mark.parametrize("kept", [0, 7, 8, 20])
def test_weights_without_their_header_are_refused_by_name(weights, kept):
    os.truncate(weights, kept)
    with pytest.raises(
        UnfitModel, match=f"{weights} must be a whole safetensors file, but: .* header"
    ):
        check_files(weights.parent)


def test_a_page_that_was_saved_in_place_of_weights_is_refused_by_name(weights):
    weights.write_text("<!DOCTYPE html><title>Not found</title>")
    with pytest.raises(UnfitModel, match=f"{weights} must be a whole safetensors file"):
        check_files(weights.parent)


PIPELINE = {"model_index.json": {"_class_name": "StableDiffusionPipeline"}}
ADAPTER = {"adapter_config.json": {"base_model_name_or_path": "Qwen/Qwen3-8B", "r": 16}}
FOREIGN = {
    "gguf": (["model-Q4_K_M.gguf"], {}, "holds GGUF, llama.cpp's format: use the full"),
    "gguf of": (["model.gguf"], {"config.json": {"_name_or_path": "Qwen/Qwen3-8B"}}, "model, Qwen"),
    "adapter": (["adapter_model.safetensors"], ADAPTER, "an adapter of Qwen/Qwen3-8B alone: give"),
    "adapter, .bin": (["adapter_model.bin"], ADAPTER, "and --adapter-path .* to train the"),
    "diffusers": (["model.safetensors"], PIPELINE, r"a pipeline of diffusers \(model_index"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_what_others_call_a_model_is_refused_by_its_name(case, tmp_path):
    files, texts, sentence = FOREIGN[case]
    for name in files:
        (tmp_path / name).write_bytes(b"GGUF")
    for name, content in texts.items():
        (tmp_path / name).write_text(json.dumps(content))
    begun = time.monotonic()
    with pytest.raises(UnfitModel, match=sentence):
        check_files(tmp_path)
    assert time.monotonic() - begun < 1


def test_a_whole_model_beside_an_adapter_s_config_is_taken(weights):
    (weights.parent / "adapter_config.json").write_text("{}")
    check_files(weights.parent)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
COMPRESSED = {"quant_method": "compressed-tensors"}
FORMATS = {
    "fp8": ({"quantization_config": FP8}, "", "async-grpo dequantize {folder} m-bf16"),
    "mxfp4": ({"quantization_config": {"quant_method": "mxfp4"}}, "", "give every role m-bf16"),
    "text": (
        {"architectures": ["Mistral3ForConditionalGeneration"],
         "text_config": {"model_type": "mistral", "quantization_config": FP8}},
        "", "async-grpo dequantize",
    ),
    "tensors": (
        {"quantization_config": COMPRESSED | {"format": "float-quantized"}},
        "", "of compressed-tensors float-quantized: run `async-grpo dequantize",
    ),
    "int4": (
        {"quantization_config": COMPRESSED | {"format": "pack-quantized"},
         "_name_or_path": "Qwen/Qwen3-8B"},
        "", "use the full-precision model, Qwen/Qwen3-8B",
    ),
    "awq": (
        {"quantization_config": {"quant_method": "awq"}, "_name_or_path": "/home/me/model"},
        "---\nlicense: mit\nbase_model:\n- Qwen/Qwen3-8B\n---\n", "model, Qwen/Qwen3-8B",
    ),
    "gptq": ({"quantization_config": {"quant_method": "gptq"}}, "base_model: a/b\n", "model, a/b"),
    "bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "", "of bitsandbytes: use the full-precision model that it was made of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMATS)
def test_quantised_weights_are_refused_with_the_command_or_the_download(case, tmp_path):
    config, card, sentence = FORMATS[case]
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text(card)
    with pytest.raises(UnfitModel) as refused:
        check_full_precision(folder)
    assert sentence.format(folder=folder) in str(refused.value)


def test_the_command_names_the_model_of_a_snapshot_and_not_its_commit(tmp_path):
    folder = tmp_path / "models--Qwen--Qwen3-8B-FP8" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    with pytest.raises(UnfitModel, match=f"dequantize {folder} Qwen3-8B-FP8-bf16`"):
        check_full_precision(folder)


def test_a_family_that_vllm_computes_otherwise_is_refused_for_sampling(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    check_sampled(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "hrm_text"}))
    with pytest.raises(UnfitModel, match=r"vLLM differs by \S+ nats from transformers in models"):
        check_sampled(tmp_path)
