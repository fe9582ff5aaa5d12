"""Exports are ordinary Hugging Face folders, complete or absent."""

import json
from pathlib import Path

import pytest
import torch
from adapted_models import KINDS, adapted
from oracle import tiny_model
from peft import PeftModel
from safetensors.torch import load_file
from test_experts import model_of
from transformers import AutoModelForCausalLM

from async_grpo.checkpoint import export, tensors
from async_grpo.checkpoint.export import export_hf
from async_grpo.checkpoint.merging import whole_folder
from async_grpo.model.adapters import adapter_text
from async_grpo.model.loading import probe_pairs, scores_alone
from async_grpo.model.policy import PolicyModel


@pytest.fixture
def source(tmp_path):
    """A folder as a user has it, with files that travel and files that do not."""
    folder = tmp_path / "source"
    tiny_model(tied=True).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "chat_template.jinja").write_text("hello")
    (folder / "model.gguf").write_text("not ours")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_with_identical_weights(tied, tmp_path):
    tiny_model(tied=tied, seed=1).save_pretrained(tmp_path / "source")
    model = tiny_model(tied=tied, seed=2)
    target = tmp_path / "run" / "hf_format" / "samples_8"
    export_hf(PolicyModel(model), source_folder=str(tmp_path / "source"), target=str(target))
    loaded, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values())
    assert ("lm_head.weight" in load_file(target / "model.safetensors")) is not tied
    for (name, got), want in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want), name


def test_only_descriptions_are_copied_and_no_temporary_stays(source, tmp_path):
    target = tmp_path / "out"
    export_hf(PolicyModel(tiny_model(tied=True)), source_folder=str(source), target=str(target))
    names = {file.name for file in target.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    } < names
    assert not names & {"model.gguf", "pytorch_model.bin.index.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_peft_loads_an_adapter_of_any_kind_and_merges_it_as_the_export_does(kind, source, tmp_path):
    policy, paths = adapted(tiny_model(tied=True), **KINDS[kind]), {}
    for end, of_adapter in (("adapter", True), ("merged", False)):
        paths[end] = tmp_path / end
        kwargs = {"source_folder": str(source), "target": str(paths[end])}
        assert not export_hf(policy, of_adapter=of_adapter, **kwargs)
    base = AutoModelForCausalLM.from_pretrained(source)
    loaded = PeftModel.from_pretrained(base, paths["adapter"])
    pairs = probe_pairs(64)
    theirs = scores_alone(loaded, pairs)
    assert (scores_alone(policy.model, pairs) - theirs).abs().max() <= 5e-6
    assert (scores_alone(tiny_model(tied=True), pairs) - theirs).abs().max() > 1e-3
    own = dict(loaded.merge_and_unload().named_parameters())
    for name, tensor in load_file(paths["merged"] / "model.safetensors").items():
        assert (tensor - own[name]).abs().max() <= 1e-6, name


@torch.no_grad()
def test_an_adapter_of_experts_is_loaded_by_peft_and_merged_with_its_base(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "adapter"
    model_of("qwen3_moe").float().save_pretrained(source)
    policy = adapted(AutoModelForCausalLM.from_pretrained(source), lora_rank=4)
    export_hf(policy, source_folder=str(source), target=str(folder), of_adapter=True)
    pairs = probe_pairs(policy.model.config.vocab_size)
    mine = scores_alone(policy.model, pairs)
    base = AutoModelForCausalLM.from_pretrained(source)
    assert (scores_alone(base, pairs) - mine).abs().max() > 1e-3
    theirs = scores_alone(PeftModel.from_pretrained(base, folder), pairs)
    merged = AutoModelForCausalLM.from_pretrained(whole_folder(str(folder)))
    assert (theirs - mine).abs().max() <= 5e-6
    assert (scores_alone(merged, pairs) - mine).abs().max() <= 5e-6


def test_an_adapter_s_folder_is_as_peft_writes_it(source, tmp_path):
    policy = adapted(tiny_model(tied=True), **KINDS["norms too"])
    export_hf(policy, source_folder=str(source), target=str(tmp_path / "out"), of_adapter=True)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {
        "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
        "generation_config.json", "tokenizer.json",
    }  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(source)
    PeftModel.from_pretrained(base, tmp_path / "out").save_pretrained(tmp_path / "theirs")
    mine, theirs = (
        load_file(tmp_path / n / "adapter_model.safetensors") for n in ("out", "theirs")
    )
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], each) for name, each in theirs.items())
    stated, other = (
        json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("out", "theirs")
    )
    assert stated == {name: other[name] for name in stated}
    assert stated["base_model_name_or_path"] == str(source) and stated["inference_mode"]
    assert stated["target_modules"] == ["k_proj"] and stated["modules_to_save"] == ["norm"]


def test_large_models_are_cut_into_indexed_files(source, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    model = tiny_model(tied=True, seed=3)
    target = tmp_path / "out"
    export_hf(PolicyModel(model), source_folder=str(source), target=str(target))
    files = sorted(target.glob("model-*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size < 30_000 for file in files)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    loaded = AutoModelForCausalLM.from_pretrained(target)
    for got, want in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want)


def test_a_base_of_a_hub_is_named_as_it_is_there():
    policy = adapted(tiny_model(tied=True), lora_rank=2)
    snapshot = Path("/cache/models--Qwen--Qwen3-8B/snapshots/0123")
    stated = json.loads(adapter_text(policy, model=snapshot))
    assert (stated["base_model_name_or_path"], stated["revision"]) == ("Qwen/Qwen3-8B", "0123")


def test_weights_take_the_type_of_the_source(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    model = tiny_model(tied=True)
    export_hf(PolicyModel(model), source_folder=str(source), target=str(tmp_path / "out"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(stored[name], parameter.to(torch.bfloat16))


def test_an_older_export_is_replaced_only_by_a_complete_one(source, tmp_path, monkeypatch):
    target = tmp_path / "out"
    old, new = tiny_model(tied=True, seed=4), tiny_model(tied=True, seed=5)
    export_hf(PolicyModel(old), source_folder=str(source), target=str(target))

    def full_disk(*_args, **_kwargs):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensors, "save_file", full_disk)
        reason = export_hf(PolicyModel(new), source_folder=str(source), target=str(target))
    assert reason.endswith("could not be written: No space left on device")
    name = "model.embed_tokens.weight"
    stored = load_file(target / "model.safetensors")
    assert torch.equal(stored[name], old.get_parameter(name))
    assert export_hf(PolicyModel(new), source_folder=str(source), target=str(target)) == ""
    stored = load_file(target / "model.safetensors")
    assert torch.equal(stored[name], new.get_parameter(name))
