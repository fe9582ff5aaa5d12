"""What a model folder must be, and the sentence that says what is wrong."""

import json

import pytest
import torch
from oracle import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from async_grpo.model.loading import load_policy
from async_grpo.model.model_folder import check_model_folder, stated_positions
from async_grpo.util.errors import UnfitModel


def save_tokenizer(folder, size=60):
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{index}": index for index in range(2, size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


def edit(folder, name="config.json", **changes):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tmp_path):
    tiny_model(tied=True).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path


def test_facts_of_a_good_folder(folder):
    facts = check_model_folder(str(folder))
    assert (facts.vocab_size, facts.max_positions) == (64, 256)
    assert facts.stop_token_ids == (1,)


def test_stop_ids_are_the_union_of_tokenizer_config_and_generation_config(folder):
    edit(folder, eos_token_id=[5, 1])
    edit(folder, "generation_config.json", eos_token_id=[9, 5])
    assert check_model_folder(str(folder)).stop_token_ids == (1, 5, 9)


def test_the_tokenizer_s_hash_follows_its_content(folder):
    before = check_model_folder(str(folder)).tokenizer_hash
    edit(folder, "tokenizer.json", padding=None)  # saved by somebody else
    assert check_model_folder(str(folder)).tokenizer_hash == before
    save_tokenizer(folder, size=61)
    assert check_model_folder(str(folder)).tokenizer_hash != before


def remove(name):
    return lambda folder: (folder / name).unlink()


def configure(**changes):
    return lambda folder: edit(folder, **changes)


DEFECTS = {
    "no config.json": (remove("config.json"), "must hold config.json"),
    "no weights": (remove("model.safetensors"), "must hold weights"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "that transformers reads"),
    "unknown type": (configure(model_type="nonsense"), "that transformers reads"),
    "no tokenizer": (remove("tokenizer.json"), r"tokenizer.json, .* has none: copy its files"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "cannot be read"),
    "large tokenizer": (lambda f: save_tokenizer(f, size=65), r"vocab_size \(64\), got 65"),
    "no eos below vocab": (configure(eos_token_id=64), r"\[1, 64\]"),
    "classifier": (configure(architectures=["Qwen3ForSequenceClassification"]), "causal language"),
    "images": (
        configure(architectures=["Gemma3ForConditionalGeneration"]),
        "is a Gemma3ForConditionalGeneration: use a text model",
    ),
    "softcapping": (configure(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
    "logit scale": (configure(logit_scale=0.0625), "logit_scale=0.0625"),
    "quantised": (configure(quantization_config={"quant_method": "gptq"}), "quantised"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named_in_one_sentence(folder, defect):
    spoil, message = DEFECTS[defect]
    spoil(folder)
    with pytest.raises(UnfitModel, match=message) as caught:
        check_model_folder(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        ('{"max_position_embeddings": 256}', 256),
        ('{"n_positions": 1024, "max_position_embeddings": null}', 1024),
        ('{"model_type": "gpt2"}', None),  # the library's default is not looked up
        ('{"max_position_embeddings": "long"}', None),
        ('{"max_position_embeddings": 900, "original_max_position_embeddings": 256}', 900),
        (
            '{"max_position_embeddings": 900, "original_max_position_embeddings": 256, '
            '"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}',
            256,
        ),
        (
            '{"max_position_embeddings": 900, "rope_parameters": '
            '{"rope_type": "longrope", "original_max_position_embeddings": 300}}',
            300,
        ),
        (
            '{"model_type": "cohere2", "max_position_embeddings": 900, "sliding_window": 400}',
            400,
        ),
        ('{"model_type": "mistral", "max_position_embeddings": 900, "sliding_window": 400}', 900),
        ("[1]", None),
        ("{", None),
    ],
)
def test_positions_are_read_without_the_library_where_they_are_stated(config, stated, tmp_path):
    (tmp_path / "config.json").write_text(config)
    assert stated_positions(tmp_path) == stated


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UnfitModel, match="nowhere' is neither"):
        check_model_folder(str(tmp_path / "nowhere"))


def test_the_policy_s_weights_are_the_folder_s_in_the_type_asked_for(folder):
    policy = load_policy(str(folder), attention="packed", dtype=torch.float32)
    expected = tiny_model(tied=True)
    for got, want in zip(policy.model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, want)
    half = load_policy(str(folder), attention="packed", dtype=torch.bfloat16)
    assert half.model.dtype == torch.bfloat16


def test_dropout_is_switched_off(folder):
    edit(folder, attention_dropout=0.3)
    policy = load_policy(str(folder), attention="packed", dtype=torch.float32)
    assert policy.model.config.attention_dropout == 0.0


def test_incomplete_weights_are_refused(tmp_path):
    tiny_model(tied=True).save_pretrained(tmp_path)
    edit(tmp_path, tie_word_embeddings=False)
    with pytest.raises(UnfitModel, match=r"first lm_head\.weight"):
        load_policy(str(tmp_path), attention="packed", dtype=torch.float32)


def test_an_architecture_that_cannot_be_packed_is_found_by_asking_it(tmp_path, monkeypatch):
    from transformers.models.qwen3 import modeling_qwen3

    tiny_model(tied=True).save_pretrained(tmp_path)
    forward = modeling_qwen3.Qwen3Model.forward

    def carry_state(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        result.last_hidden_state = result.last_hidden_state.cumsum(1)
        return result

    monkeypatch.setattr(modeling_qwen3.Qwen3Model, "forward", carry_state)
    with pytest.raises(UnfitModel, match="must score as separate sequences"):
        load_policy(str(tmp_path), attention="packed", dtype=torch.float32)


def test_another_architecture_packs_too(tmp_path):
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), attention="packed", dtype=torch.float32)
    assert len(policy.layers) == 2
    assert not any(m.p for m in policy.modules() if isinstance(m, torch.nn.Dropout))
