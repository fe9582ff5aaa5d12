"""A model small enough to start an engine in seconds, and its weights as snapshots."""

from dataclasses import replace

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from async_grpo.types import CanaryRow, WeightSample, WeightsVersion
from async_grpo.weight_sync.buckets import pack

VOCABULARY = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {chr(48 + i): 3 + i for i in range(75)}


def make_model(folder, *, tied, hidden_size=64, vocab_size=128):
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=5,  # not the contract's: an engine that obeys it is found out
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return save_tokenizer(folder)


def save_tokenizer(folder):
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


def load_model(folder, *, noise_seed=None):
    """The model in float32; with a seed its parameters are moved far from the folder's."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if noise_seed is not None:
        generator = torch.Generator().manual_seed(noise_seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def canary_of(model, rows):
    """The rows as the trainer sends them: scored by `model` at temperature 1."""
    canary = []
    for row in rows:
        ids = torch.from_numpy(row.astype(np.int64))
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        canary.append(CanaryRow(row, logprobs.gather(1, ids[1:, None])[:, 0].numpy()))
    return tuple(canary)


def snapshot_of(named_tensors, batches, *, canary=()):
    """Small buckets, so that a model needs several."""
    version = WeightsVersion(0, batches)
    snapshot = pack(iter(named_tensors), put=np.copy, version=version, bucket_bytes=40_000)
    return replace(snapshot, canary=canary)


def samples_of(named_tensors, *, seed=0, num=5):
    """Some rows and columns of each tensor, as a trainer samples them."""
    rng = np.random.default_rng(seed)
    samples = []
    for name, tensor in named_tensors:
        chosen = [np.sort(rng.permutation(size)[:num]) for size in tensor.shape]
        values = tensor.detach().float().numpy()[np.ix_(*chosen)]
        rows, columns = chosen if len(chosen) > 1 else (*chosen, np.empty(0, np.int64))
        samples.append(WeightSample(name, rows, columns, values))
    return tuple(samples)
