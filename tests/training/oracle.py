"""The gradient of a batch, computed the plain way: the judge of everything that packs or shards.

One process, one unpacked forward a row through transformers' own attention and head, full
log-softmax; `formulas.py` has the objectives. Nothing of the package but the records decides
anything here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from formulas import Output, objective
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from async_grpo.algorithms.base import LossSums
from async_grpo.algorithms.grpo_loss import grpo_loss
from async_grpo.config.train_config import TrainConfig
from async_grpo.model.attention import PACKED
from async_grpo.types import (
    Episode,
    Question,
    Row,
    Sample,
    Tally,
    Turn,
    Verdict,
    VersionSpan,
    WeightsVersion,
    tally,
)

VOCAB_SIZE = 64


def make_config(**options) -> TrainConfig:
    """Options of a run whose outputs are those of this file: short."""
    given = {
        "model_name_or_path": "m",
        "data_path": "d",
        "max_generation_tokens": 12,
        "max_tokens_per_gpu": 64,
    }
    return TrainConfig.from_options(given | options)


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


def make_row(prompt, output, *, mask=None, behaviour=None) -> Row:
    """A row out of plain lists."""
    length = len(output)
    return Row(
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        token_ids=np.array(output, dtype=np.int32),
        logprobs=np.array(np.zeros(length) if behaviour is None else behaviour, dtype=np.float32),
        loss_mask=np.array(np.ones(length) if mask is None else mask, dtype=np.bool_),
        weights_versions=(VersionSpan(WeightsVersion(0, 0), 0, length),),
    )


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
    """A sample of one row out of plain lists."""
    row = make_row(prompt, output, mask=mask, behaviour=behaviour)
    return sample_of_rows([row], reference=reference, advantage=advantage, ordinal=ordinal)


def sample_of_rows(
    rows: Sequence[Row], *, reference=None, advantage: float = 1.0, ordinal: int = 0
) -> Sample:
    """A sample with a turn in each of its rows; `reference` is laid end to end."""
    turns = (Turn(row.token_ids, row.logprobs, row.weights_versions, "stop", "") for row in rows)
    return Sample(
        ordinal=ordinal,
        index=0,
        question=Question(rows[0].prompt_token_ids, "", None, {}),
        episode=Episode(tuple(rows), tuple(turns)),
        verdict=Verdict.scored(1.0, adapter="test"),
        advantage=advantage,
        scores={} if reference is None else {"reference": np.array(reference, dtype=np.float32)},
    )


def sent(*ranks, aggregation: str = "sample-mean") -> tuple[Tally, ...]:
    """What the end of a step tells the audit: samples by rank, of whatever minibatches."""
    return tuple(tally(samples, incarnation=0, aggregation=aggregation) for samples in ranks)


def random_samples(
    rng: np.random.Generator,
    count: int,
    *,
    max_length: int = 12,
    temperature: float = 1.0,
    one_prompt: bool = False,
    max_rows: int = 1,
    branching: float = 0.0,
    model,
) -> list[Sample]:
    """Samples whose behaviour and reference lie around the model's own log-probabilities.

    `branching`: how often a row begins as an earlier one does, within its prompt or its output.
    """
    samples, earlier = [], []
    for ordinal in range(count):
        rows, own = [], []
        for number in range(rng.integers(1, max_rows + 1) if max_rows > 1 else 1):
            if number or not (one_prompt and samples):
                prompt = rng.integers(VOCAB_SIZE, size=rng.integers(1, max_length))
            if earlier and rng.random() < branching:
                source = earlier[rng.integers(len(earlier))]
                prompt = source[: rng.integers(1, len(source) + 1)]
            output = rng.integers(VOCAB_SIZE, size=rng.integers(1, max_length))
            stems = [e[len(prompt) :] for e in earlier if np.array_equal(e[: len(prompt)], prompt)]
            if stems and rng.random() < branching:
                stem = stems[rng.integers(len(stems))]
                output = np.concatenate([stem[: rng.integers(0, len(stem) + 1)], output])[
                    : max_length - 1
                ]
            if branching:
                earlier.append(np.concatenate([prompt, output]))
            plain = make_sample(prompt, output)
            scores = oracle_logprobs(model, plain, temperature=temperature).detach().numpy()
            mask = rng.random(len(output)) < 0.8
            noisy = scores + rng.normal(0, 0.3, len(output))
            rows.append(make_row(prompt, output, mask=mask, behaviour=noisy))
            own.append(scores)
        reference = np.concatenate(own)
        reference = reference + rng.normal(0, 0.3, len(reference))
        advantage = float(rng.normal())
        samples.append(
            sample_of_rows(rows, reference=reference, advantage=advantage, ordinal=ordinal)
        )
    return samples


def oracle_twin(model) -> Qwen3ForCausalLM:
    """The same weights in float64 behind transformers' own attention."""
    twin = with_exact_norms(copy.deepcopy(model).to(torch.float64))
    twin.set_attn_implementation("sdpa")
    twin.zero_grad()
    return twin


def oracle_scores(
    model, sample: Sample, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every output token, masked or not, and entropy where it was drawn: [L]."""
    chosen, entropies = [], []
    for row in sample.episode.rows:
        prompt, output = row.prompt_token_ids, row.token_ids
        ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]
        chosen += [logprobs[t, token] for t, token in enumerate(output)]
        entropies.append(-(logprobs.exp() * logprobs).sum(-1))
    return torch.stack(chosen), torch.cat(entropies)


def oracle_logprobs(model, sample: Sample, *, temperature: float) -> torch.Tensor:
    """[L] log-probability of every output token, masked or not."""
    return oracle_scores(model, sample, temperature=temperature)[0]


def oracle_outputs(
    model,
    samples: Sequence[Sample],
    config: TrainConfig,
    *,
    start_logprobs: Sequence[np.ndarray] | None = None,
) -> list[Output]:
    """What the formulas read of each sample; `start_logprobs` [L] each are those of the batch's
    first step, for later steps of `decoupled`."""
    outputs = []
    for index, sample in enumerate(samples):
        rows = sample.episode.rows
        trained = np.flatnonzero(np.concatenate([row.loss_mask for row in rows]))
        logprobs, entropies = oracle_scores(model, sample, temperature=config.sampling.temperature)
        outputs.append(
            Output(
                sample.advantage,
                [logprobs[t] for t in trained],
                [entropies[t] for t in trained],
                _floats(np.concatenate([row.logprobs for row in rows]), trained),
                _floats(sample.scores.get("reference"), trained),
                _floats(None if start_logprobs is None else start_logprobs[index], trained),
            )
        )
    return outputs


def _floats(values: np.ndarray | None, trained: np.ndarray) -> list[float] | None:
    return None if values is None else [float(values[t]) for t in trained]


def loss_with(config: TrainConfig, logprobs, entropy, packed) -> LossSums:
    """GRPO's sums under these options."""
    return grpo_loss(logprobs, entropy, packed, objective=config.objective, mode=config.mode)


def oracle_gradient(
    model,
    samples: Sequence[Sample],
    config: TrainConfig,
    *,
    start_logprobs: Sequence[np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Gradient of the objective in float64, by parameter name; `model` is left alone."""
    twin = oracle_twin(model)
    outputs = oracle_outputs(twin, samples, config, start_logprobs=start_logprobs)
    objective(outputs, config).backward()
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def relative_difference(got: dict, expected: dict) -> float:
    """Norm of the difference over the norm of what was expected, all parameters together.

    Absolute where nothing is expected.
    """
    assert got.keys() == expected.keys()
    difference = sum((got[name].double() - expected[name]).square().sum() for name in expected)
    norm = sum(value.square().sum() for value in expected.values())
    return (difference.sqrt() / (norm.sqrt() if norm else 1.0)).item()
