"""The gradient of a batch, computed the plain way: the judge of everything that packs or shards.

One process, one unpacked forward a sample through transformers' own attention and head, full
log-softmax, the formulas of the design written out token by token. Nothing of the package but the
records decides anything here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from async_grpo.model.attention import PACKED
from async_grpo.types import Completion, Question, Sample, Verdict, VersionSpan, WeightsVersion

VOCAB_SIZE = 64


def tiny_config(*, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )


def tiny_model(*, tied: bool, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A random Qwen3 with weights large enough for peaked distributions."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM._from_config(tiny_config(tied=tied), attn_implementation=PACKED)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model = model.to(dtype)
    return with_exact_norms(model) if dtype == torch.float64 else model


def with_exact_norms(model):
    """transformers' norms compute in float32 whatever their type; torch's own keep float64."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Qwen3RMSNorm):
                norm = torch.nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def make_sample(
    prompt,
    output,
    *,
    mask=None,
    behaviour=None,
    reference=None,
    advantage: float = 1.0,
    ordinal: int = 0,
) -> Sample:
    """A sample out of plain lists."""
    length = len(output)
    version = WeightsVersion(0, 0)
    completion = Completion(
        token_ids=np.array(output, dtype=np.int32),
        logprobs=np.array(np.zeros(length) if behaviour is None else behaviour, dtype=np.float32),
        weights_versions=(VersionSpan(version, 0, length),),
        loss_mask=np.array(np.ones(length) if mask is None else mask, dtype=np.bool_),
        finish_reason="stop",
        text="",
    )
    return Sample(
        ordinal=ordinal,
        index=0,
        question=Question(np.array(prompt, dtype=np.int32), "", None, {}),
        completion=completion,
        verdict=Verdict("scored", 1.0, None, "test", "", 0.0),
        advantage=advantage,
        reference_logprobs=None if reference is None else np.array(reference, dtype=np.float32),
    )


def random_samples(
    rng: np.random.Generator, count: int, *, max_length: int = 12, temperature: float = 1.0, model
) -> list[Sample]:
    """Samples whose behaviour and reference lie around the model's own log-probabilities."""
    samples = []
    for ordinal in range(count):
        prompt = rng.integers(VOCAB_SIZE, size=rng.integers(1, max_length))
        output = rng.integers(VOCAB_SIZE, size=rng.integers(1, max_length))
        plain = make_sample(prompt, output)
        own = oracle_logprobs(model, plain, temperature=temperature).detach().numpy()
        samples.append(
            make_sample(
                prompt,
                output,
                mask=rng.random(len(output)) < 0.8,
                behaviour=own + rng.normal(0, 0.3, len(output)),
                reference=own + rng.normal(0, 0.3, len(output)),
                advantage=float(rng.normal()),
                ordinal=ordinal,
            )
        )
    return samples


def oracle_twin(model) -> Qwen3ForCausalLM:
    """The same weights in float64 behind transformers' own attention."""
    twin = with_exact_norms(copy.deepcopy(model).to(torch.float64))
    twin.set_attn_implementation("sdpa")
    twin.zero_grad()
    return twin


def oracle_logprobs(model, sample: Sample, *, temperature: float) -> torch.Tensor:
    """[L] log-probability of every output token, masked or not."""
    prompt, output = sample.question.input_token_ids, sample.completion.token_ids
    ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    first = len(prompt)
    return torch.stack([logprobs[first + t - 1, ids[first + t]] for t in range(len(output))])


def oracle_loss(
    model,
    samples: Sequence[Sample],
    *,
    denominator: str,
    clip: tuple[float, float],
    kl_coefficient: float,
    kl_estimator: str,
    aggregation: str,
    constant_length: int,
    temperature: float,
) -> torch.Tensor:
    """(1 / D) Σ_i Σ_t w_i m_it loss_it, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = 0
    for sample in samples:
        mask = sample.completion.loss_mask
        length = int(mask.sum())
        num_tokens += length
        logprobs = oracle_logprobs(model, sample, temperature=temperature)
        for t in np.flatnonzero(mask):
            lp = logprobs[t]
            old = lp.item() if denominator == "on_policy" else float(sample.completion.logprobs[t])
            ratio = torch.exp(lp - old)
            loss = -ratio * sample.advantage
            is_cut = (
                ratio.item() > 1 + clip[1] if sample.advantage > 0 else ratio.item() < 1 - clip[0]
            )
            if is_cut:
                bound = 1 + clip[1] if sample.advantage > 0 else 1 - clip[0]
                loss = -bound * sample.advantage + 0 * lp
            if kl_coefficient:
                ref = float(sample.reference_logprobs[t])
                kl = (
                    torch.exp(ref - lp) - (ref - lp) - 1
                    if kl_estimator == "k3"
                    else (lp - ref) ** 2 / 2
                )
                loss = loss + kl_coefficient * kl
            weight = {"sample-mean": 1 / length, "token-mean": 1.0}.get(
                aggregation, 1 / (constant_length or 1)
            )
            total = total + weight * loss
    return total / (num_tokens if aggregation == "token-mean" else len(samples))


def oracle_gradient(model, samples: Sequence[Sample], **formula) -> dict[str, torch.Tensor]:
    """Gradient of `oracle_loss` in float64, by parameter name; `model` is left alone."""
    twin = oracle_twin(model)
    oracle_loss(twin, samples, **formula).backward()
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def relative_difference(got: dict, expected: dict) -> float:
    """Norm of the difference over the norm of what was expected, all parameters together.

    Absolute where nothing is expected.
    """
    assert got.keys() == expected.keys()
    difference = sum((got[name].double() - expected[name]).square().sum() for name in expected)
    norm = sum(value.square().sum() for value in expected.values())
    return (difference.sqrt() / (norm.sqrt() if norm else 1.0)).item()
