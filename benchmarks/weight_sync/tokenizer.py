"""A tokenizer of single characters, which a worker wants to find beside its model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {chr(48 + i): 3 + i for i in range(75)}


def write_tokenizer(folder: Path) -> None:
    """Save it in a model's folder."""
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
