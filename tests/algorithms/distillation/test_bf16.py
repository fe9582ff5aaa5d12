"""What bf16 may round: the model, and nothing of the loss.

Held fixed: the last hidden states and the head's weight, as a sharded policy computes them in bf16.
Of these, a float64 oracle has every preset's loss and every teacher payload's, which must be equal
to the rounding of float32, in which they are computed. The gradient goes on in bf16: each number by
a logit is rounded once, and each sum of its products once more, which bounds its error element by
element. Free: samples, options, the head's chunks.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distilled import make_samples, make_teachers
from distilled import objective as taught_objective
from effort import histories
from formulas import cancellation, distance_to_a_cut, objective
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import VOCAB_SIZE, make_config, oracle_outputs, oracle_twin, tiny_model
from test_distilled_gradient import OPTIONS
from test_gradient import (
    CANCELLED,
    CUT,
    F32,
    backward,
    cut_into_parts,
    draw_start,
    finished,
    make_groups,
    oracle_group,
    preset_config,
)
from torch.distributed.device_mesh import init_device_mesh

from async_grpo.algorithms.distillation_loss import HIDDEN, LOGITS
from async_grpo.config.objective import PRESET_NAMES
from async_grpo.config.roles import TEACHER
from async_grpo.config.teaching import OPTIONS_OF_TERM
from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import shard
from async_grpo.training.learner import Learner
from async_grpo.types import Minibatch

BF16 = torch.bfloat16
ROUNDED = 2.0**-8  # of a number in bf16, at most, relative to it
TWIN = oracle_twin(tiny_model(tied=False))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy():
    """A policy on the only rank of a group, which computes in bf16."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = PolicyModel(tiny_model(tied=False))
    shard(policy, init_device_mesh("cpu", (1,)), mixed_precision="bf16")
    yield policy
    dist.destroy_process_group()


class GivenStates:
    """Stands for the oracle's model: its logits are the float64 products of what bf16 gave.

    In its block `policy` makes one forward of `parts`, the rows of samples.
    """

    def __init__(self, policy, parts):
        self._policy, self._parts = policy, parts
        self._logits = {}

    def __enter__(self):
        compute = PolicyModel.hidden_states

        def kept(packed):
            self.states = compute(self._policy, packed)
            self.states.retain_grad()
            weight = self._policy.head.weight.detach()
            assert self.states.dtype == weight.dtype == BF16
            self.exact = self.states.detach().double().requires_grad_()
            self.weight = weight.double().requires_grad_()
            self.logits = self.exact @ self.weight.T
            self.logits.retain_grad()
            return self.states

        self._policy.hidden_states = kept
        for parameter in self._policy.parameters():
            parameter.grad = None
        return self

    def __exit__(self, *_):
        del self._policy.hidden_states
        taken = 0
        for part in self._parts:  # in the order of packing; other tokens are not asked for
            (row,) = part.episode.rows
            trained = len(row.prompt_token_ids) - 1 + np.flatnonzero(row.loss_mask)
            logits = torch.zeros(row.num_tokens, VOCAB_SIZE, dtype=torch.float64)
            own = self.logits[taken : taken + len(trained)]
            taken += len(trained)
            ids = (*row.prompt_token_ids.tolist(), *row.token_ids.tolist())
            self._logits[ids] = logits.index_put((torch.from_numpy(trained),), own)
        assert taken == len(self.logits)

    def __call__(self, *, input_ids, use_cache):
        assert not use_cache
        return Answer(self._logits[tuple(input_ids[0].tolist())][None])

    @property
    def tells_rows_apart(self):
        return len(self._logits) == len(self._parts)


class Answer:
    def __init__(self, logits):
        self.logits = logits


def assert_rounded_once(seen, policy):
    """The policy's gradient by its states and head is the oracle's, rounded where bf16 must."""
    by_logit, states, weight = seen.logits.grad, seen.exact.detach(), seen.weight.detach()
    by_weight = policy.head.weight.grad.full_tensor()
    assert by_weight.dtype == torch.float32
    for got, want, (left, right) in (
        (seen.states.grad, seen.exact.grad, (by_logit, weight)),
        (by_weight, seen.weight.grad, (by_logit.T, states)),
    ):
        products = left.abs() @ right.abs()
        # In float32, numbers by logits are exact to a part of the largest: they are differences.
        in_float32 = F32[1] * left.abs().amax() * right.abs().sum(0)
        bound = ROUNDED * (1 + ROUNDED) * products + ROUNDED * want.abs() + 2 * in_float32
        assert ((got.double() - want).abs() <= bound).all()


@settings(max_examples=histories(4, full=100), deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), chunk_size=st.integers(1, 60))
@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_a_preset_s_loss_is_the_oracle_s_of_the_states_that_bf16_gave(
    preset, data, seed, chunk_size, policy
):
    config, rng = preset_config(data.draw, preset), np.random.default_rng(seed)
    groups = make_groups(rng, num_groups=2, model=TWIN, config=config)
    exact = [sample for group in groups for sample in oracle_group(group, config)]
    samples = finished(groups, config)
    assume(any(sample.num_trained_tokens for sample in exact))
    start = draw_start(rng, samples, config)
    parts, by_part = cut_into_parts(samples, start)
    seen = GivenStates(policy, parts)
    with seen:
        indices = range(len(parts))
        loss = backward(policy, parts, indices, config, start=by_part, chunk_size=chunk_size)
    assume(seen.tells_rows_apart)
    outputs = oracle_outputs(seen, exact, config, start_logprobs=start)
    assume(distance_to_a_cut(outputs, config) > CUT)
    expected = objective(outputs, config)
    left = cancellation(expected, outputs, config)
    assume(left == 0 or left > CANCELLED or config.objective.entropy_coefficient)
    by_tokens = config.objective.aggregation == "token-mean"
    d = sum(sample.num_trained_tokens for sample in exact) if by_tokens else len(exact)
    (expected * d).backward()
    assert loss / d == pytest.approx(expected.item(), rel=F32[1], abs=F32[1])
    assert_rounded_once(seen, policy)


class Watched:
    """A head term that keeps what it was handed of teachers' rows."""

    def __init__(self, term):
        self.term, self.name = term, term.name
        self.seen = {"value": [], "gradient": []}

    def value(self, logprobs, rows):
        self.seen["value"].append(rows)
        return self.term.value(logprobs, rows)

    def gradient(self, logprobs, rows):
        self.seen["gradient"].append(rows)
        return self.term.gradient(logprobs, rows)

    @property
    def names(self):
        return {name for name in self.seen["value"][0] if name.startswith(TEACHER)}


def rounded(values):
    return torch.from_numpy(values).to(BF16).float().numpy()


def taught_config(data, kind, *, teachers):
    """Options of a run that has a divergence from payloads of this kind."""
    options = data.draw(OPTIONS) | {
        "teacher_payload": kind,
        "teacher_for": teachers,
        "gkd_coefficient": data.draw(st.sampled_from([0.7, 2.0])),
        "loss_chunksize": data.draw(st.integers(1, 60)),
    }
    unread = {
        name for term, names in OPTIONS_OF_TERM.items() if not options[term] for name in names
    }
    return make_config(**{name: options[name] for name in options.keys() - unread})


def in_bf16(samples, states):
    """The samples, and their teachers' hidden states, as a teacher that computes in bf16 says them;
    float32 holds its numbers."""
    said = [
        {name: rounded(v) if name in (HIDDEN, LOGITS) else v for name, v in s.scores.items()}
        for s in samples
    ]
    samples = [replace(s, scores=own) for s, own in zip(samples, said, strict=True)]
    return samples, [rounded(own) for own in states]


def of_trained(parts, name):
    """[N] or [N, K] as the parts' teachers said it of their trained tokens."""
    return torch.from_numpy(
        np.concatenate([p.scores[name][p.episode.rows[0].loss_mask] for p in parts])
    )


# How a rank is told of a token's distribution; in bf16 also the teacher's head is, and express
# brings its logits as they are.
@settings(max_examples=histories(4, full=100), deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), share_given=st.sampled_from([0.0, 0.5, 1.0]))
@pytest.mark.parametrize("is_bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", ["topk", "hidden", "logits", "express"])
def test_a_teacher_s_numbers_arrive_as_sent_and_make_the_oracle_s_loss(
    kind, is_bf16, data, seed, share_given, policy
):
    is_express, rng = kind == "express", np.random.default_rng(seed)
    several = data.draw(st.sampled_from(["math", "+=plus,times"]))
    config = taught_config(
        data, "logits" if is_express else kind, teachers="math" if is_express else several
    )
    widths = rng.choice((VOCAB_SIZE, VOCAB_SIZE - 3, VOCAB_SIZE + 5), len(config.teacher_names))
    teachers, dtype = make_teachers(rng, widths), BF16 if is_bf16 else torch.float32
    for teacher in teachers:
        teacher.head.copy_(teacher.head.to(dtype))
        teacher.bias.copy_(teacher.bias.to(dtype))
    samples, numbers, states = make_samples(
        rng, config, teachers, count=4, model=TWIN, max_rows=2, share_given=share_given
    )
    if is_bf16:
        samples, states = in_bf16(samples, states)
    parts = [part for sample in samples for part in sample.parts()]
    learner = Learner(policy, config, SimpleNamespace(rank=0, device=CPU))
    (term,) = learner.algorithm.teacher_terms([t.on_rank(config, dtype) for t in teachers])
    learner.step.head_terms = (watched := Watched(term),)
    dense = {LOGITS: of_trained(parts, LOGITS).to(dtype)} if is_express else {}
    assume(any(sample.num_trained_tokens for sample in samples))
    seen = GivenStates(policy, parts)
    with seen:
        learner.accumulate(Minibatch(0, tuple(parts), dense=dense))
    assume(seen.tells_rows_apart)
    for name in watched.names:
        sent = dense[name] if name in dense else of_trained(parts, name)
        for rows in watched.seen.values():
            arrived = torch.cat([own[name] for own in rows])
            assert torch.equal(arrived, sent)
            assert arrived.dtype == sent.dtype or not sent.is_floating_point()
    outputs = oracle_outputs(seen, [s for s in samples if not s.episode.is_given], config)
    assume(distance_to_a_cut(outputs, config) > CUT)
    expected = taught_objective(seen, samples, config, teachers, numbers, states)
    by_tokens = config.objective.aggregation == "token-mean"
    d = sum(sample.num_trained_tokens for sample in samples) if by_tokens else len(samples)
    (expected * d).backward()
    (loss,) = learner.step.losses
    assert loss.item() / d == pytest.approx(expected.item(), rel=F32[1], abs=F32[1])
    assert_rounded_once(seen, policy)
