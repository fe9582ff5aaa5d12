"""An adapter's folder is taken as a model: merged into its base once, or refused in a sentence."""

import json
from pathlib import Path

import pytest
import torch
from oracle import tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_loading import save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.checkpoint import merging
from async_grpo.checkpoint.merging import whole_folder
from async_grpo.util.errors import ConfigError, UnfitModel

OPTIONS = {
    "r": 4, "lora_alpha": 24, "target_modules": "all-linear", "task_type": "CAUSAL_LM",
    "init_lora_weights": False,
}  # fmt: skip


@pytest.fixture
def base(tmp_path):
    tiny_model(tied=True).save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    return tmp_path / "base"


def write_adapter(base, folder, **options):
    """One of peft's own, whose B is not 0."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(**(OPTIONS | options))).save_pretrained(folder)
    return folder


def edit(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True, "r": 2}, {"modules_to_save": ["norm"], "rank_pattern": {"q_proj": 2}}],
    ids=["all linear", "dora", "patterns"],
)
def test_an_adapter_of_peft_s_is_merged_as_peft_merges_it(options, base, tmp_path):
    folder = write_adapter(base, tmp_path / "adapter", **options)
    whole = whole_folder(str(folder))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    theirs = dict(theirs.merge_and_unload().named_parameters())
    own = dict(AutoModelForCausalLM.from_pretrained(whole).named_parameters())
    assert own.keys() == theirs.keys()
    for name, parameter in own.items():
        assert (parameter - theirs[name]).abs().max() <= 1e-6, name
    assert AutoTokenizer.from_pretrained(whole)("w3")["input_ids"] == [3]


def test_it_is_merged_once_until_the_adapter_changes(base, tmp_path):
    folder = write_adapter(base, tmp_path / "adapter")
    first = whole_folder(str(folder))
    (merged,) = (folder / "merged").iterdir()
    assert merged.samefile(first)
    made = merged.stat().st_ino
    assert whole_folder(str(folder)) == first and merged.stat().st_ino == made
    write_adapter(base, folder, lora_alpha=2)
    second = whole_folder(str(folder))
    name = "model.layers.0.mlp.up_proj.weight"
    mine, other = (load_file(f"{each}/model.safetensors")[name] for each in (first, second))
    assert not torch.equal(mine, other)


def test_the_base_s_type_is_kept_and_the_adapter_s_own_texts_come_first(base, tmp_path):
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    folder = write_adapter(base, tmp_path / "adapter")
    (folder / "chat_template.jinja").write_text("mine")
    (base / "chat_template.jinja").write_text("the base's")
    whole = whole_folder(str(folder))
    kinds = {each.dtype for each in load_file(f"{whole}/model.safetensors").values()}
    assert kinds == {torch.bfloat16}
    assert AutoTokenizer.from_pretrained(whole).chat_template == "mine"


def test_a_model_is_taken_as_it_is(base):
    assert whole_folder(str(base)) == str(base)
    assert {file.suffix for file in base.iterdir()} == {".json", ".safetensors"}


def cut(folder):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_A" in name)
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, file)


def name_base(name):
    return lambda folder: edit(folder, base_model_name_or_path=name)


REFUSED = {
    "none named": (name_base(None), "must name it: it names none"),
    "gone": (name_base("/x/y"), "must name it: .*'/x/y' is neither"),
    "not fetched": (name_base("a/b"), "must name it: 'a/b' is no folder"),
    "kind": (lambda folder: edit(folder, use_qalora=True), "must be LoRA .* has use_qalora True"),
    "shapes": (cut, r"for this model and no others, 1 differ, first base_model\.model\.model"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_base_or_another_is_refused_before_weights_are_read(case, base, tmp_path):
    change, sentence = REFUSED[case]
    folder = write_adapter(base, tmp_path / "adapter")
    change(folder)
    name = "model.norm.weight"
    weights = load_file(base / "model.safetensors")
    save_file(weights | {name: weights[name][:-1]}, base / "model.safetensors")  # read, it is told
    with pytest.raises(UnfitModel, match=sentence):
        whole_folder(str(folder))


def test_an_adapter_of_another_model_is_refused(base, tmp_path):
    folder = write_adapter(base, tmp_path / "adapter")
    config = json.loads((base / "config.json").read_text())
    smaller = config | {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (base / "config.json").write_text(json.dumps(smaller))
    with pytest.raises(UnfitModel, match=r"for this model .* differ, first .*layers\.1"):
        whole_folder(str(folder))


def test_who_merges_at_the_same_time_takes_what_is_there_first(base, tmp_path):
    folder = write_adapter(base, tmp_path / "adapter")
    first = Path(whole_folder(str(folder)))
    made = first.stat().st_ino
    merging._merge(folder, base, first)  # as a second that has begun before the first was done
    assert first.stat().st_ino == made
    assert [*(folder / "merged").iterdir()] == [first]


def test_a_folder_that_cannot_be_written_is_told(base, tmp_path):
    folder = write_adapter(base, tmp_path / "adapter")
    (folder / "merged").write_text("")
    with pytest.raises(ConfigError, match=r"written into .*merged.* failed .*: copy the adapter"):
        whole_folder(str(folder))
