"""Samples with teachers, and the gradient of distillation the plain way: token by token in float64.

One unpacked forward a row through transformers' own model, whole distributions, `dense.py` and
`training/formulas.py`. Of the package it uses records alone, and what a teacher says of its logits.
"""

from dataclasses import dataclass, replace

import dense
import numpy as np
import torch
from formulas import engine_corrections, kl_term, old_logprobs, policy_ratios, policy_term
from formulas import token_weight as weight_of
from oracle import VOCAB_SIZE, oracle_outputs, random_samples

from async_grpo.algorithms.base import Teacher
from async_grpo.algorithms.distillation_loss import top_k_with_tail
from async_grpo.model.lm_head import Head

HIDDEN = 7


@dataclass(frozen=True)
class Taught:
    """A teacher's own model: a head over hidden states that stand for what it read."""

    head: torch.Tensor  # [V, HIDDEN] float64
    bias: torch.Tensor  # [V]

    @property
    def width(self):
        return len(self.head)

    def logits(self, hidden):
        return torch.from_numpy(hidden).double() @ self.head.T + self.bias

    def on_rank(self, config, dtype):
        if config.teaching.teacher_payload != "hidden":
            return Teacher(self.width)
        return Teacher(self.width, Head(self.head.to(dtype), self.bias.to(dtype)))


def make_teachers(rng, widths):
    return [
        Taught(
            torch.from_numpy(rng.normal(0, 2, (w, HIDDEN))), torch.from_numpy(rng.normal(size=w))
        )
        for w in widths
    ]


def make_samples(rng, config, teachers, *, count, model, max_rows, share_given):
    """Samples of which some are given, each with a teacher: (samples, their teachers, hidden)."""
    samples, numbers, states = [], [], []
    for sample in random_samples(
        rng, count, temperature=config.sampling.temperature, max_rows=max_rows, model=model
    ):
        number = int(rng.integers(len(teachers)))
        length = len(sample.scores["reference"])
        hidden = rng.normal(0, 0.5, (length, HIDDEN)).astype(np.float32)
        own = (sample.scores["reference"] + rng.normal(0, 1, length)).astype(np.float32)
        said = {"teacher": own, **payload(config, teachers, number, hidden)}
        is_given = config.teaching.gkd_coefficient > 0 and rng.random() < share_given
        scores = said if is_given else sample.scores | said
        samples.append(replace(as_given(sample) if is_given else sample, scores=scores))
        numbers.append(number)
        states.append(hidden)
    return samples, numbers, states


def payload(config, teachers, number, hidden):
    """What the rank fetches of these tokens."""
    if not config.teaching.gkd_coefficient:
        return {}
    logits = teachers[number].logits(hidden)
    index = {"teacher.index": np.full(len(hidden), number, np.int32)}
    if config.teaching.teacher_payload == "hidden":
        return {"teacher.hidden": hidden, **index}
    if config.teaching.teacher_payload == "logits":
        widest = max(teacher.width for teacher in teachers)
        filled = np.zeros((len(hidden), widest), np.float32)
        filled[:, : logits.shape[1]] = logits
        return {"teacher.logits": filled, **index}
    ids, logprobs, tail = top_k_with_tail(
        logits,
        config.teaching.gkd_top_k,
        temperature=config.teaching.teacher_temperature or config.teaching.gkd_temperature,
        width=VOCAB_SIZE,
    )
    said = {"teacher.ids": ids.numpy(), "teacher.logprobs": logprobs.float().numpy()}
    return {**said, "teacher.tail": tail.float().numpy(), **index}


def as_given(sample):
    """The same tokens, which nobody sampled: no behaviour, no version, no advantage."""
    rows = tuple(replace(row, logprobs=None, weights_versions=()) for row in sample.episode.rows)
    return replace(sample, episode=replace(sample.episode, rows=rows, turns=()), advantage=0.0)


def objective(model, samples, config, teachers, numbers, states):
    """(1 / D) Σ_i Σ_t w_i (policy_it + β kl_it - c entropy_it + γ divergence_it)."""
    total = torch.zeros((), dtype=torch.float64)
    for sample, number, hidden in zip(samples, numbers, states, strict=True):
        mask = np.concatenate([row.loss_mask for row in sample.episode.rows])
        if not mask.any():
            continue
        loss = 0.0 if sample.episode.is_given else sampled_terms(model, sample, config)
        if config.teaching.gkd_coefficient:
            scale = (
                config.teaching.gkd_temperature**2
                if config.teaching.gkd_square_temperature
                else 1.0
            )
            found = divergences(model, sample, config, teachers[number], hidden)[mask]
            loss = loss + config.teaching.gkd_coefficient * scale * found.sum()
        total = total + weight_of(int(mask.sum()), config) * loss
    num_tokens = sum(sample.num_trained_tokens for sample in samples)
    return total / (num_tokens if config.objective.aggregation == "token-mean" else len(samples))


def sampled_terms(model, sample, config):
    """Σ_t of GRPO's terms, of which each token's advantage is κ A + η clip(tea - lp, ±c)."""
    (output,) = oracle_outputs(model, [sample], config)
    mask = np.concatenate([row.loss_mask for row in sample.episode.rows])
    teacher = sample.scores["teacher"][mask].tolist()
    old = old_logprobs(output, config.mode)
    ratios = policy_ratios(output, old, config.objective.ratio_level)
    corrections = engine_corrections(output, old, config)
    total = torch.zeros((), dtype=torch.float64)
    for t, logprob in enumerate(output.logprobs):
        gap = teacher[t] - logprob.item()
        if config.teaching.opd_clip:
            gap = max(-config.teaching.opd_clip, min(config.teaching.opd_clip, gap))
        advantage = (
            config.teaching.reward_coefficient * output.advantage
            + config.teaching.opd_coefficient * gap
        )
        loss = corrections[t] * policy_term(ratios[t], logprob, advantage, config)
        if config.objective.kl_in_loss:
            penalty = kl_term(logprob, output.reference[t], old[t], config.objective.kl_estimator)
            loss = loss + config.objective.kl_coefficient * penalty
        total = total + loss - config.objective.entropy_coefficient * output.entropies[t]
    return total


def divergences(model, sample, config, teacher, hidden):
    """[L] of every output token, from both models' whole logits, or from what was said of K."""
    parts = []
    for row in sample.episode.rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.token_ids]).astype("i8"))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        parts.append(logits[len(row.prompt_token_ids) - 1 : -1])
    logits, alpha, temperature = (
        torch.cat(parts),
        config.teaching.gkd_alpha,
        config.teaching.gkd_temperature,
    )
    if config.teaching.teacher_payload != "topk":
        said = sample.scores.get("teacher.logits")
        said = teacher.logits(hidden) if said is None else torch.from_numpy(said).double()
        said = said[:, : teacher.width]
        own = config.teaching.teacher_temperature
        return dense.divergence(logits, said, alpha=alpha, temperature=temperature, of_teacher=own)
    ids = torch.from_numpy(sample.scores["teacher.ids"])
    p = dense.cells((logits[:, : teacher.width] / temperature).softmax(-1), ids)
    said = [sample.scores["teacher.logprobs"], sample.scores["teacher.tail"][:, None]]
    q = torch.from_numpy(np.concatenate(said, axis=-1)).double().exp()[:, : p.shape[-1]]
    return dense.jsd(p, q, alpha)
