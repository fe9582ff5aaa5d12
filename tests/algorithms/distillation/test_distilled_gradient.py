"""Whatever is mixed, the gradient of a batch is that of one float64 pass (design, section 4).

Rewards' advantages, a teacher's, divergences from one or two teachers of other widths in any
payload, KL to the reference, entropy; sampled rows and given ones. Free: the order of rows, the
ranks, their minibatches and fillers, the chunks of the head. Held fixed: samples and weights.
"""

import numpy as np
import pytest
import torch
from distilled import make_samples, make_teachers, objective
from effort import histories
from formulas import distance_to_a_cut
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import (
    VOCAB_SIZE,
    make_config,
    oracle_outputs,
    oracle_twin,
    relative_difference,
    tiny_model,
)
from test_gradient import CUT, partition

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.teaching import OPTIONS_OF_TERM
from async_grpo.model.collate import collate
from async_grpo.model.policy import PolicyModel, hf_named_parameters

MODELS = {
    (tied, dtype): PolicyModel(tiny_model(tied=tied, dtype=dtype))
    for tied in (True, False)
    for dtype in (torch.float32, torch.float64)
}
TWINS = {key: oracle_twin(policy.model) for key, policy in MODELS.items()}
PRECISIONS = {torch.float64: 1e-12, torch.float32: 1e-5}
OPTIONS = st.fixed_dictionaries(
    {
        "ratio_mode": st.sampled_from(["on_policy", "behaviour", "decoupled"]),
        "aggregation": st.sampled_from(["sample-mean", "token-mean"]),
        "policy_loss": st.sampled_from(["clip", "cispo"]),
        "temperature": st.sampled_from([1.0, 0.7]),
        "kl_coefficient": st.sampled_from([0.0, 0.1]),
        "entropy_coefficient": st.sampled_from([0.0, 0.02]),
        "reward_coefficient": st.sampled_from([1.0, 0.0, 0.5]),
        "opd_coefficient": st.sampled_from([0.0, 0.5]),
        "opd_clip": st.sampled_from([0.0, 1.5]),
        "gkd_coefficient": st.sampled_from([0.0, 0.7, 2.0]),
        "gkd_alpha": st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
        "gkd_temperature": st.sampled_from([0.5, 1.0, 2.0]),
        "teacher_temperature": st.sampled_from([0.0, 0.25, 3.0]),
        "gkd_square_temperature": st.booleans(),
        "gkd_top_k": st.sampled_from([1, 8, VOCAB_SIZE - 4]),
        "teacher_payload": st.sampled_from(["topk", "hidden", "logits"]),
        "teacher_for": st.sampled_from(["math", "+=plus,times"]),
    }
)


def gradient_of(policy, parts, ranks, config, teachers, *, chunk_size):
    """Loss and gradient by parameter: plain sums of every rank's minibatches."""
    dtype = policy.model.dtype
    algorithm = find_algorithm(config)
    terms = algorithm.teacher_terms([teacher.on_rank(config, dtype) for teacher in teachers])
    policy.zero_grad()
    loss = 0.0
    for indices in (indices for minibatches in ranks for indices in minibatches):
        packed = collate(
            [parts[index] for index in indices],
            aggregation=config.objective.aggregation,
            scores=algorithm.score_columns,
            scores_of_given=algorithm.scores_of_given,
            share_prompts=policy.shares_prompts,
            dtype=dtype,
        )
        scored = policy(
            packed, temperature=config.sampling.temperature, chunk_size=chunk_size, terms=terms
        )
        found = algorithm.loss(scored, packed).loss
        found.backward()
        loss += found.item()
    return loss, {name: p.grad for name, p in hf_named_parameters(policy)}


@settings(max_examples=histories(30, full=2_000), deadline=None)
@given(
    options=OPTIONS,
    seed=st.integers(0, 2**32),
    count=st.integers(1, 6),
    num_ranks=st.integers(1, 4),
    chunk_size=st.integers(1, 60),
    tied=st.booleans(),
    share_given=st.sampled_from([0.0, 0.5, 1.0]),
)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_gradient_is_the_oracle_s_for_any_mixture_and_streaming(
    dtype, options, seed, count, num_ranks, chunk_size, tied, share_given
):
    assume(options["opd_coefficient"] or options["gkd_coefficient"])
    unread = {
        name for term, names in OPTIONS_OF_TERM.items() if not options[term] for name in names
    }
    config = make_config(**{name: options[name] for name in options.keys() - unread})
    rng = np.random.default_rng(seed)
    widths = (VOCAB_SIZE, VOCAB_SIZE - 3, VOCAB_SIZE + 5)
    teachers = make_teachers(rng, rng.choice(widths, len(config.teacher_names)))
    twin = TWINS[tied, dtype]
    samples, numbers, states = make_samples(
        rng, config, teachers, count=count, model=twin, max_rows=3, share_given=share_given
    )
    assume(any(sample.num_trained_tokens for sample in samples))
    outputs = oracle_outputs(twin, [s for s in samples if not s.episode.is_given], config)
    assume(dtype == torch.float64 or distance_to_a_cut(outputs, config) > CUT)
    twin.zero_grad()
    expected_loss = objective(twin, samples, config, teachers, numbers, states)
    expected_loss.backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    parts = [part for sample in samples for part in sample.parts()]
    ranks = partition(rng, parts, range(len(parts)), num_ranks=num_ranks)
    loss, got = gradient_of(
        MODELS[tied, dtype], parts, ranks, config, teachers, chunk_size=chunk_size
    )
    num_tokens = sum(sample.num_trained_tokens for sample in samples)
    d = num_tokens if config.objective.aggregation == "token-mean" else len(samples)
    # What a teacher says is float32 in both: its cells are 1 together to that only.
    rounding = max(PRECISIONS[dtype], 1e-6)
    assert loss / d == pytest.approx(expected_loss.item(), rel=rounding, abs=rounding)
    assert relative_difference({n: g / d for n, g in got.items()}, expected) < PRECISIONS[dtype]
