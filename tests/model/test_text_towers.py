"""The text model in a folder of one that also takes images is read, trained and put back alone."""

import json

import pytest
import torch
from model_families import family_model
from safetensors.torch import load_file, save_file
from test_families import TEMPERATURE, alone, pairs_of
from test_loading import save_tokenizer
from tower_models import BEGINS, IMAGE, TOWERS, save_tower
from transformers import AutoModelForImageTextToText, AutoTokenizer

from async_grpo.checkpoint.export import export_hf
from async_grpo.data.questions import LineReader, MalformedLine
from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate_pairs
from async_grpo.model.foreign_folders import stated_config
from async_grpo.model.loading import load_policy
from async_grpo.model.model_folder import check_files, check_model_folder, read_config
from async_grpo.model.text_towers import text_name
from async_grpo.model.weight_files import check_weights
from async_grpo.util.errors import UnfitModel


@pytest.fixture(scope="module", params=TOWERS)
def tower(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tokenizer(folder)
    return folder, save_tower(request.param, folder)


def load(folder):
    return load_policy(str(folder), attention=PACKED, dtype=torch.float32)


def test_a_packed_row_has_log_probabilities_and_gradients_of_the_whole_model_s(tower):
    folder, whole = tower
    if hasattr(whole, "set_experts_implementation"):
        whole.set_experts_implementation("eager")  # torch groups products up to float32 alone
    policy = load(folder).double()
    policy.model.set_experts_implementation("eager")
    pairs = [(prompt % 57 + 3, output % 57 + 3) for prompt, output in pairs_of()]
    packed = collate_pairs(pairs, share_prompts=policy.shares_prompts)
    scored = policy(packed, temperature=TEMPERATURE, chunk_size=4)
    expected, _ = (torch.cat(p) for p in zip(*(alone(whole, *p) for p in pairs), strict=True))
    torch.testing.assert_close(scored.logprobs, expected, rtol=2e-5, atol=2e-6)
    whole.zero_grad()
    for logprobs in (scored.logprobs, expected):
        logprobs.sin().sum().backward()
    theirs = {text_of(name): each.grad for name, each in whole.named_parameters()}
    for name, own in policy.model.named_parameters():
        assert (own.grad - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name


def text_of(name):
    """The text model's own name of a parameter of the whole one."""
    return name.replace("model.language_model.", "model.").replace("model.text_model.", "model.")


@torch.no_grad()
def test_an_export_has_the_trained_text_model_and_the_rest_to_the_byte(tower, tmp_path):
    folder, _ = tower
    policy = load(folder)
    for parameter in policy.parameters():
        parameter.mul_(1.5)
    assert not export_hf(policy, source_folder=str(folder), target=str(tmp_path / "out"))
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        expected = tensor * 1.5 if text_name(name) and not is_buffer(name) else tensor
        assert torch.equal(after[name], expected), name
    _, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values())
    for parameter, again in zip(
        policy.parameters(), load(tmp_path / "out").parameters(), strict=True
    ):
        assert torch.equal(parameter, again)


def is_buffer(name):
    return name.endswith("layer_scalar")


def test_a_check_reads_the_text_model_alone(tower):
    folder, _ = tower
    assert check_weights(str(folder), seconds=10) == ""
    facts = check_model_folder(str(folder))
    assert facts.text_model == read_config(folder).model_type
    assert IMAGE in facts.other_tokens
    assert facts.vocab_size == stated_config(folder)["vocab_size"] == 64


def test_a_line_with_an_image_s_token_is_refused(tmp_path):
    save_tower("gemma3", tmp_path)
    save_tokenizer(tmp_path, size=64)
    facts = check_model_folder(str(tmp_path))
    reader = LineReader(
        tokenizer=AutoTokenizer.from_pretrained(tmp_path), vocab_size=64, max_tokens=9,
        other_tokens=facts.other_tokens,
    )  # fmt: skip
    assert reader.question({"input_token_ids": [5, 6]}).input_token_ids.tolist() == [5, 6]
    for ids in ([5, IMAGE], [BEGINS, 5]):
        with pytest.raises(MalformedLine, match=r"a prompt of text alone, .* of an image or sound"):
            reader.question({"input_token_ids": ids})
    pair = {"input_token_ids": [5], "completion_token_ids": [IMAGE, 1]}
    with pytest.raises(MalformedLine, match="a pair of text alone"):
        reader.pair(pair)


def test_a_head_that_the_config_ties_otherwise_than_the_files_is_refused(tmp_path):
    save_tower("mistral3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(UnfitModel, match="set tie_word_embeddings to false"):
        load(tmp_path)


def test_what_has_no_text_model_of_its_own_is_refused_by_name(tmp_path):
    family_model("qwen3", attention="eager", dtype=torch.float32).save_pretrained(tmp_path)
    config = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": {}}))
    with pytest.raises(UnfitModel, match=r"is a Qwen2VLForConditionalGeneration: use a text model"):
        read_config(tmp_path)


def test_a_whole_that_scores_a_text_otherwise_than_its_text_model_is_refused(tmp_path):
    save_tower("aya_vision", tmp_path)  # without the factor of Cohere's logits
    with pytest.raises(UnfitModel, match=r"score a text as its text model .* is off by \d"):
        load(tmp_path)


def test_weights_by_other_names_are_refused_and_not_read_otherwise(tmp_path):
    save_tower("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    other = {name.replace("language_model.", "lm."): each for name, each in load_file(file).items()}
    save_file(other, file, metadata={"format": "pt"})
    with pytest.raises(
        UnfitModel, match=r"a text model among others, must .* (there is no|other names)"
    ):
        load(tmp_path)


def test_one_cannot_be_drawn_at_random(tmp_path):
    save_tower("gemma3", tmp_path)
    with pytest.raises(UnfitModel, match="--init random must draw a model of text alone"):
        check_files(tmp_path, needs_weights=False)
