"""The project's first promise: any streaming of a batch gives the gradient of one float64 pass.

Held fixed: the verified groups, the weights, the options. From rewards to the gradient: shaping,
advantages and masks (`algorithms/grpo.py`), packing, log-probabilities, loss. Free: the order of
samples' rows, the ranks, how many minibatches each of them makes, the fillers between, which rows
of a minibatch share their prompt, and the chunks of the head; samples that contribute exactly zero
are counted and not sent. float32 is compared away from the cuts of clip and mask, where a rounded
ratio may fall on the other side, and both types where the terms do not cancel, which would leave
nothing but their rounding.
"""

import asyncio
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from adapted_models import ALL_KINDS, adapted, adapted_twin, scale_of, tiny
from effort import FULL, histories
from formulas import (
    cancellation,
    distance_to_a_cut,
    group_advantages,
    objective,
    shaped_reward,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import (
    make_config,
    oracle_outputs,
    oracle_twin,
    random_samples,
    relative_difference,
    tiny_model,
)

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.packing import items_of, pack_rounds
from async_grpo.config.objective import PRESET_NAMES
from async_grpo.model.collate import collate
from async_grpo.model.policy import PolicyModel, hf_named_parameters, trained_parameters
from async_grpo.types import Group

F64, F32 = (torch.float64, 1e-12), (torch.float32, 1e-5)
CUT = 1e-4  # a float32 ratio of these samples is rounded by less
CANCELLED = 0.2  # float32 log-probabilities of these samples are rounded by up to 1e-6
MODELS = {
    (tied, dtype): PolicyModel(tiny_model(tied=tied, dtype=dtype))
    for tied in (True, False)
    for dtype in (torch.float32, torch.float64)
}
TWINS = {key: oracle_twin(policy.model) for key, policy in MODELS.items()}
MODES = ("on_policy", "behaviour", "decoupled")
PENALTIES = st.fixed_dictionaries(
    {
        "kl_coefficient": st.sampled_from([0.0, 0.1]),
        "kl_estimator": st.sampled_from(["k1", "k2", "k3", "k3_iw"]),
        "entropy_coefficient": st.sampled_from([0.0, 0.02]),
        "temperature": st.sampled_from([1.0, 0.7]),
    }
)
CORRECTIONS = st.fixed_dictionaries(
    {
        "importance_correction": st.sampled_from(["none", "truncate", "mask"]),
        "correction_level": st.sampled_from(["token", "sequence"]),
        "correction_low": st.floats(0.3, 0.9),
        "correction_high": st.floats(1.1, 2.0),
    }
)
RATIOS = st.fixed_dictionaries(
    {
        "advantage": st.sampled_from(["grpo", "dr", "rloo"]),
        "overlong_buffer_tokens": st.sampled_from([0, 6]),
        "overlong_penalty": st.sampled_from([0.5, 1.0]),
        "mask_truncated_samples": st.booleans(),
        "aggregation": st.sampled_from(["sample-mean", "token-mean", "constant"]),
        "policy_loss": st.sampled_from(["clip", "cispo"]),
        "ratio_level": st.sampled_from(["token", "sequence"]),
        "clip_low": st.floats(0.05, 0.4),
        "clip_high": st.floats(0.05, 0.4),
        "dual_clip": st.sampled_from([0.0, 1.2, 1.6]),
    }
)


@st.composite
def any_config(draw):
    """A preset, or any combination of options that `TrainConfig` allows."""
    if draw(st.booleans()):
        return combined_config(draw)
    return preset_config(draw, draw(st.sampled_from(PRESET_NAMES)))


def combined_config(draw):
    mode = draw(st.sampled_from(MODES))
    options = {"ratio_mode": mode} | draw(RATIOS) | draw(PENALTIES) | draw(CORRECTIONS)
    if mode == "behaviour":
        options["importance_correction"] = "none"
    if options["ratio_level"] == "sequence":
        options |= {"aggregation": "sample-mean", "policy_loss": "clip"}
    if options["policy_loss"] == "cispo":
        options["dual_clip"] = 0.0
    if options["aggregation"] == "constant":
        options["constant_length_samples"] = 17
    return make_config(**options)


def preset_config(draw, preset):
    """A preset with the modes and penalties that a user may add to it."""
    mode = draw(st.sampled_from(MODES))
    penalties = draw(PENALTIES)
    if preset == "rloo":
        del penalties["kl_estimator"]
    correction = {} if mode == "behaviour" else draw(CORRECTIONS)
    return make_config(preset=preset, ratio_mode=mode, **penalties, **correction)


def make_groups(rng, *, num_groups, model, config):
    """Verified groups of 2 to 4 outputs, some cut; few rewards, so that some are equal."""
    groups = []
    for _ in range(num_groups):
        count = rng.integers(2, 5)
        members = random_samples(
            rng,
            count,
            temperature=config.sampling.temperature,
            one_prompt=rng.random() < 0.8,
            max_rows=1 if has_sequence_terms(config) else 3,
            branching=rng.choice([0.0, 0.7]),
            model=model,
        )
        groups.append(tuple(_verified(rng, sample) for sample in members))
    return groups


def has_sequence_terms(config):
    """Such ratios are refused for episodes of several rows."""
    corrects = (
        config.objective.importance_correction != "none"
        and config.objective.correction_level == "sequence"
    )
    return corrects or config.objective.ratio_level == "sequence"


def _verified(rng, sample):
    reason = "length" if rng.random() < 0.25 else "stop"
    *turns, last = sample.episode.turns
    turns = (*turns, replace(last, finish_reason=reason))
    return replace(
        sample,
        episode=replace(sample.episode, turns=turns),
        verdict=replace(sample.verdict, reward=float(rng.integers(0, 3))),
    )


def finished(groups, config):
    """All samples with the advantages and masks of the package's own rules."""
    rules = LocalRules(find_algorithm(config))
    found = [asyncio.run(rules.finish_group(Group(0, 99, tuple(group)))) for group in groups]
    return [sample for group in found for sample in group.samples]


def oracle_group(group, config):
    """The group's samples with advantages and masks by the formulas."""
    rewards = []
    for sample in group:
        rows = sample.episode.rows
        mask = laid_end_to_end(row.loss_mask for row in rows)
        rewards.append(
            shaped_reward(
                sample.verdict.reward,
                config,
                length=max(len(row.token_ids) for row in rows),
                behaviour=laid_end_to_end(row.logprobs for row in rows)[mask].tolist(),
                reference=sample.scores["reference"][mask].tolist(),
            )
        )
    advantages = group_advantages(rewards, config.objective.advantage)
    samples = []
    for sample, advantage in zip(group, advantages, strict=True):
        episode = sample.episode
        if config.objective.mask_truncated_samples and episode.turns[-1].finish_reason == "length":
            rows = (replace(row, loss_mask=row.loss_mask & False) for row in episode.rows)
            episode = replace(episode, rows=tuple(rows))
        samples.append(replace(sample, episode=episode, advantage=advantage))
    return samples


def laid_end_to_end(parts):
    return np.concatenate(list(parts))


def draw_start(rng, samples, config):
    """[L] a sample: log-probabilities at the start of the batch; none in the batch's first step."""
    if config.mode != "decoupled" or rng.random() < 0.3:
        return None
    behaviours = (laid_end_to_end(row.logprobs for row in s.episode.rows) for s in samples)
    return [(own + rng.normal(0, 0.2, len(own))).astype(np.float32) for own in behaviours]


def cut_into_parts(samples, start):
    """The rows that are packed, and what belongs to each of them of `start`."""
    parts, starts = [], []
    for number, sample in enumerate(samples):
        parts += sample.parts()
        if start is not None:
            lengths = [len(row.token_ids) for row in sample.episode.rows]
            starts += np.split(start[number], np.cumsum(lengths)[:-1])
    return parts, starts if start is not None else None


def partition(rng, samples, indices, *, num_ranks):
    """Minibatches by rank: the indices in any order, cut anywhere, with fillers between."""
    order = rng.permutation(indices).astype(int)
    cuts = np.sort(rng.integers(0, len(order) + 1, size=rng.integers(0, len(order) + 1)))
    parts = [list(part) for part in np.split(order, cuts)] + [[]] * rng.integers(0, 3)
    ranks = [[] for _ in range(num_ranks)]
    for part in parts:
        ranks[rng.integers(num_ranks)].append(part)
    return ranks


def as_batched(rng, samples, indices, *, num_ranks):
    """Minibatches by rank, of rows of one question, as the batcher packs what begins alike."""
    rows = [replace(samples[index], ordinal=0, index=int(index)) for index in indices]
    items = items_of(rows, attention_ratio=100.0, shares_prefixes=True)
    budget = max((item.num_tokens for item in items), default=0) + int(rng.integers(0, 60))
    rounds = pack_rounds(items, num_ranks=num_ranks, max_tokens=budget)
    return [[[], *([key[1] for key in bins[rank]] for bins in rounds)] for rank in range(num_ranks)]


def streamed(policy, samples, ranks, config, *, start=None, chunk_size):
    """Loss and gradient of rows: every rank's plain sum over its minibatches, divided once."""
    total = {name: 0.0 for name, _ in trained_parameters(policy)}
    loss = 0.0
    for minibatches in ranks:
        policy.zero_grad()
        for indices in minibatches:
            loss += backward(policy, samples, indices, config, start=start, chunk_size=chunk_size)
        for name, parameter in trained_parameters(policy):
            total[name] += 0.0 if parameter.grad is None else parameter.grad
    whole = [part for part in samples if part.row == 0]
    num_tokens = sum(sample.num_trained_tokens for sample in whole)
    divisor = num_tokens if config.objective.aggregation == "token-mean" else len(whole)
    gradient = {name: value.double() / divisor for name, value in total.items()}
    return loss / divisor, gradient


def backward(policy, samples, indices, config, *, start, chunk_size):
    dtype = policy.model.dtype
    packed = collate(
        [samples[index] for index in indices],
        aggregation=config.objective.aggregation,
        constant_length=config.objective.constant_length_samples,
        scores=find_algorithm(config).score_columns,
        share_prompts=policy.shares_prompts,
        dtype=dtype,
    )
    scored = policy(packed, temperature=config.sampling.temperature, chunk_size=chunk_size)
    if start is not None:
        parts = [start[index][samples[index].episode.rows[0].loss_mask] for index in indices]
        old = torch.tensor(np.concatenate([[], *parts]), dtype=dtype)
        packed = replace(packed, scores={**packed.scores, "old": old})
    result = find_algorithm(config).loss(scored, packed)
    result.loss.backward()
    return result.loss.item()


def check(config, *, precision, tied, **streaming):
    dtype, tolerance = precision
    twin = TWINS[tied, dtype]
    leaves = dict(twin.named_parameters())
    check_with(MODELS[tied, dtype], twin, leaves, config, tolerance=tolerance, **streaming)


def check_with(policy, twin, leaves, config, *, tolerance, seed, num_groups, num_ranks, chunk_size):
    """`leaves`: the twin's parameter for each that the policy trains."""
    dtype, rng = policy.model.dtype, np.random.default_rng(seed)
    twin.zero_grad()
    for leaf in leaves.values():
        leaf.grad = None
    groups = make_groups(rng, num_groups=num_groups, model=twin, config=config)
    exact = [sample for group in groups for sample in oracle_group(group, config)]
    samples = finished(groups, config)
    assume(any(sample.num_trained_tokens for sample in exact))
    start = draw_start(rng, samples, config)
    outputs = oracle_outputs(twin, exact, config, start_logprobs=start)
    assume(dtype == torch.float64 or distance_to_a_cut(outputs, config) > CUT)
    expected_loss = objective(outputs, config)
    left = cancellation(expected_loss, outputs, config)
    assume(left == 0 or left > CANCELLED or config.objective.entropy_coefficient)
    expected_loss.backward()
    expected = {name: leaf.grad for name, leaf in leaves.items()}
    samples, start = cut_into_parts(samples, start)
    sent = [index for index, part in enumerate(samples) if part.contributes]
    ranks = (partition if rng.random() < 0.5 else as_batched)(
        rng, samples, sent, num_ranks=num_ranks
    )
    loss, got = streamed(policy, samples, ranks, config, start=start, chunk_size=chunk_size)
    assert loss == pytest.approx(expected_loss.item(), rel=tolerance, abs=tolerance)
    assert relative_difference(got, expected) < tolerance


STREAMINGS = {
    "seed": st.integers(0, 2**32),
    "num_groups": st.integers(1, 2),
    "num_ranks": st.integers(1, 4),
    "chunk_size": st.integers(1, 60),
    "tied": st.booleans(),
}


@settings(max_examples=histories(30, full=2_000), deadline=None)
@given(config=any_config(), **STREAMINGS)
@pytest.mark.parametrize("precision", [F64, F32], ids=["f64", "f32"])
def test_gradient_is_the_oracle_s_for_any_streaming(precision, config, **streaming):
    check(config, precision=precision, **streaming)


@settings(max_examples=100 if FULL else 5, deadline=None)
@given(data=st.data(), **STREAMINGS)
@pytest.mark.parametrize("precision", [F64, F32], ids=["f64", "f32"])
@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_a_preset_s_gradient_is_the_oracle_s_for_any_streaming(
    preset, precision, data, **streaming
):
    check(preset_config(data.draw, preset), precision=precision, **streaming)


@functools.cache
def adapted_pair(kind, tied):
    policy = adapted(tiny(tied=tied), **ALL_KINDS[kind])
    make = functools.partial(tiny, tied=tied)
    return policy, *adapted_twin(make, policy, scale=scale_of(ALL_KINDS[kind]))


@settings(max_examples=100 if FULL else 2, deadline=None)
@given(data=st.data(), kind=st.sampled_from([*ALL_KINDS]), **STREAMINGS)
@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_an_adapter_s_gradient_is_the_oracle_s_for_any_streaming(
    preset, data, kind, tied, **streaming
):
    pair, config = adapted_pair(kind, tied), preset_config(data.draw, preset)
    check_with(*pair, config, tolerance=F64[1], **streaming)
    policy = pair[0]
    assert all(each.grad is None for _, each in hf_named_parameters(policy))


def test_a_filler_s_gradient_is_exactly_zero():
    config = make_config(ratio_mode="behaviour", kl_coefficient=0.1, entropy_coefficient=0.1)
    policy = MODELS[True, torch.float32]
    policy.zero_grad()
    backward(policy, [], [], config, start=None, chunk_size=4)
    for _, parameter in hf_named_parameters(policy):
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
