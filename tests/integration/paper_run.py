"""A run worked out on paper: float64, one process, a policy that moves by known updates.

AdamW with both decays at 0 and an epsilon of 1 moves a parameter by -lr * g / (|g| + 1), a smooth
function of the gradient g alone. So every gradient of the run is known from the oracle's, every
version of the weights too, and completions can be given the log-probabilities that the policy of k
versions ago would have recorded.
"""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from formulas import engine_corrections, group_advantages, objective, old_logprobs, policy_ratios
from oracle import make_sample, oracle_logprobs, oracle_outputs, oracle_twin

from async_grpo.types import Turn, VersionSpan, WeightsVersion

KNOWN_UPDATES = {
    "adam_beta1": 0.0,
    "adam_beta2": 0.0,
    "adam_epsilon": 1.0,
    "max_grad_norm": 0.0,
    "weight_decay": 0.0,
    "lr_scheduler": "constant",
}


@dataclass(frozen=True)
class PaperRun:
    """What was handed out, and what must come of it."""

    groups: tuple  # by ordinal: (completions, rewards), each a tuple
    rows: tuple[dict[str, float], ...]  # by gradient step
    weights: tuple[dict[str, torch.Tensor], ...]  # by completed batches, from 0


def play(model, config, prompts, *, lag, seed):
    """A run in which batch b is sampled by the weights of b - `lag` batches.

    `prompts`: token ids by ordinal.
    """
    rng = np.random.default_rng(seed)
    versions, groups, rows = [oracle_twin(model)], [], []
    for batch in range(config.batching.num_training_batches):
        past, policy = versions[max(0, batch - lag)], copy.deepcopy(versions[-1])
        for step in range(config.batching.steps_per_batch):
            samples = []
            for _ in range(config.batching.questions_per_step):
                prompt = prompts[len(groups)]
                completions = _hand_out(past, config, prompt, max(0, batch - lag), rng)
                rewards = tuple(rng.random(len(completions)).tolist())
                groups.append((completions, rewards))
                advantages = group_advantages(rewards, config.objective.advantage)
                samples += _samples(prompt, completions, advantages)
            rows.append(_step(policy, versions[-1] if step else None, samples, config))
        versions.append(policy)
    weights = tuple(dict(version.named_parameters()) for version in versions)
    return PaperRun(tuple(groups), tuple(rows), weights)


def _hand_out(past, config, prompt, batches, rng):
    """Random tokens with the log-probabilities that the policy `past` records."""
    completions = []
    for _ in range(config.sampling.samples_per_question):
        length = int(rng.integers(4, config.sampling.max_generation_tokens + 1))
        output = rng.integers(3, 70, size=length).astype(np.int32)
        recorded = _logprobs(past, make_sample(prompt, output), config)
        completions.append(
            Turn(
                token_ids=output,
                logprobs=recorded.astype(np.float32),
                weights_versions=(VersionSpan(WeightsVersion(0, batches), 0, length),),
                finish_reason="stop",
                text="",
            )
        )
    return tuple(completions)


@torch.no_grad()
def _logprobs(policy, sample, config):
    return oracle_logprobs(policy, sample, temperature=config.sampling.temperature).numpy()


def _samples(prompt, completions, advantages):
    return [
        make_sample(
            prompt,
            completion.token_ids,
            behaviour=completion.logprobs,
            advantage=advantage,
        )
        for completion, advantage in zip(completions, advantages, strict=True)
    ]


def _step(policy, start, samples, config):
    """Moves `policy` by one gradient step, and says what the step's metrics must be.

    `start`: the policy at the start of the batch, when it has moved since.
    """
    kept = start and [_logprobs(start, sample, config) for sample in samples]
    outputs = oracle_outputs(policy, samples, config, start_logprobs=kept)
    loss = objective(outputs, config)
    policy.zero_grad()
    loss.backward()
    gradients = [parameter.grad for parameter in policy.parameters()]
    row = _metrics(outputs, config) | {
        "loss": loss.item(),
        "grad_norm": math.sqrt(sum(g.square().sum().item() for g in gradients)),
    }
    with torch.no_grad():
        for parameter, g in zip(policy.parameters(), gradients, strict=True):
            parameter -= (
                config.optimizer.learning_rate * g / (g.abs() + config.optimizer.adam_epsilon)
            )
    return row


def _metrics(outputs, config):
    """How far the policy is from what was recorded, over the trained tokens."""
    pairs = [
        (logprob.item(), said)
        for output in outputs
        for logprob, said in zip(output.logprobs, output.behaviour, strict=True)
    ]
    ratios = [math.exp(now - said) for now, said in pairs]
    cut, corrected = _cuts(outputs, config)
    count = len(ratios)
    return {
        "trained_tokens": count,
        "mismatch_max": max(abs(now - said) for now, said in pairs),
        "mismatch_ratio_max": max(ratios),
        "mismatch_kl": math.fsum(r - 1 - math.log(r) for r in ratios) / count,
        "effective_sample_size": math.fsum(ratios) ** 2 / math.fsum(r * r for r in ratios) / count,
        "clip_fraction": cut / count,
        "corrected_fraction": corrected / count,
    }


def _cuts(outputs, config):
    """(tokens whose gradient the clip cut, tokens whose weight was truncated)."""
    cut = corrected = 0
    for output in outputs:
        old = old_logprobs(output, config.mode)
        for ratio in policy_ratios(output, old, config.objective.ratio_level):
            above = output.advantage > 0 and ratio.item() > 1 + config.objective.clip_high
            below = output.advantage < 0 and ratio.item() < 1 - config.objective.clip_low
            cut += above or below
        weights = engine_corrections(output, old, config)
        corrected += sum(weight == config.objective.correction_high for weight in weights)
    return cut, corrected if config.objective.importance_correction == "truncate" else 0
