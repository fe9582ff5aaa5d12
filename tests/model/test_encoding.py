"""Which tokenizers count as one: small ones of three kinds, trained here, saved and changed."""

import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from async_grpo.model.model_folder import encoding_hash

TEXTS = ["the model samples, the model learns; 12 345 é", "weights and words and wonders"] * 9


def bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60,
        special_tokens=["<unk>", "<eos>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def letters():
    ids = {"<eos>": 0, "<unk>": 1} | {chr(97 + n): 2 + n for n in range(26)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


def hash_of(tokenizer):
    return encoding_hash(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"))


def changed(tokenizer, change):
    told = json.loads(tokenizer.to_str())
    change(told)
    return Tokenizer.from_str(json.dumps(told))


@pytest.mark.parametrize("make", [bpe, unigram, letters])
def test_a_tokenizer_that_was_saved_and_read_keeps_its_hash(make, tmp_path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), eos_token="<eos>")
    before = encoding_hash(tokenizer)
    tokenizer.save_pretrained(tmp_path / "once")
    AutoTokenizer.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "twice")
    again = AutoTokenizer.from_pretrained(tmp_path / "twice")
    assert encoding_hash(again) == before


def swap_letters(told):
    ids = told["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]


def reverse_merges(told):
    told["model"]["merges"].reverse()


def lower(told):
    told["normalizer"] = {"type": "Lowercase"}


def split_digits(told):
    told["pre_tokenizer"] = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize(
    ("make", "change"),
    [(letters, swap_letters), (bpe, reverse_merges), (bpe, lower), (unigram, split_digits)],
)
def test_one_that_encodes_otherwise_has_another(make, change):
    tokenizer = make()
    assert hash_of(changed(tokenizer, change)) != hash_of(changed(tokenizer, lambda told: None))
