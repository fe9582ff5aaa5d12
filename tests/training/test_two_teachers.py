"""Several teachers of other hidden sizes and widths, from payloads to the gradient.

What a minibatch holds is what one of each teacher's samples alone would give: also where only rows
of one of them lie in it, which are then filled up to that one's width.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import VOCAB_SIZE, make_config, make_sample, tiny_model

from async_grpo.algorithms.base import Teacher
from async_grpo.algorithms.find import find_algorithm
from async_grpo.model.collate import collate
from async_grpo.model.lm_head import Head
from async_grpo.model.policy import PolicyModel
from async_grpo.training.stream import with_payloads
from async_grpo.types import Minibatch, Ticket

NAMES = ("teacher:small", "teacher:large")


def distilling(kind):
    """The options of a run that learns from two teachers, and from no reward."""
    return make_config(
        teacher_for="a=small,b=large",
        gkd_coefficient=1.0,
        reward_coefficient=0.0,
        teacher_payload=kind,
        ratio_mode="on_policy",
    )


def taught(numbers, kind, sizes, widths):
    """A minibatch of one sample for each number of a teacher, its payloads in hand."""
    samples, found = [], []
    for ordinal, number in enumerate(numbers):
        made = make_sample([1, 2], [3, 4, 5], ordinal=ordinal)
        own = {"teacher": np.full(3, -1.0, np.float32)}
        tickets = (Ticket((None,), NAMES[number], 0),)
        samples.append(replace(made, scores=own, tickets=tickets))
        columns = sizes[number] if kind == "hidden" else widths[number]
        rng = np.random.default_rng(ordinal)
        found.append({kind: rng.normal(size=(3, columns)).astype(np.float32)})
    return with_payloads(Minibatch(0, tuple(samples)), found, teachers=NAMES)


def only(number, minibatch):
    """A minibatch of one of its samples, which have three tokens each."""
    dense = {name: rows[3 * number :][:3] for name, rows in minibatch.dense.items()}
    return replace(minibatch, samples=minibatch.samples[number:][:1], dense=dense)


def gradient(policy, config, minibatch, *, heads, kind):
    algorithm = find_algorithm(config)
    terms = algorithm.teacher_terms(
        [Teacher(len(h.weight), h if kind == "hidden" else None) for h in heads]
    )
    policy.zero_grad()
    packed = collate(
        minibatch.samples,
        dense=minibatch.dense,
        aggregation=config.objective.aggregation,
        scores=algorithm.score_columns,
        scores_of_given=algorithm.scores_of_given,
        dtype=torch.float64,
    )
    scored = policy(packed, temperature=1.0, chunk_size=4, terms=terms)
    algorithm.loss(scored, packed).loss.backward()
    return torch.cat([p.grad.flatten().clone() for p in policy.parameters()])


@pytest.mark.parametrize("kind", ["hidden", "logits"])
@pytest.mark.parametrize(
    ("sizes", "widths"),
    [
        ((5, 9), (VOCAB_SIZE, VOCAB_SIZE)),
        ((5, 5), (VOCAB_SIZE - 6, VOCAB_SIZE)),
        ((9, 5), (VOCAB_SIZE, VOCAB_SIZE + 3)),
    ],
)
def test_samples_of_two_teachers_give_the_sum_of_what_each_alone_gives(kind, sizes, widths):
    config = distilling(kind)
    generator = torch.Generator().manual_seed(0)
    heads = [
        Head(torch.randn(width, size, generator=generator, dtype=torch.float64))
        for width, size in zip(widths, sizes, strict=True)
    ]
    policy = PolicyModel(tiny_model(tied=True, dtype=torch.float64))
    both = taught((0, 1), kind, sizes, widths)
    alone = [only(number, taught((number,) * 2, kind, sizes, widths)) for number in (0, 1)]
    options = {"heads": heads, "kind": kind}
    total = gradient(policy, config, both, **options)
    parts = [gradient(policy, config, samples, **options) for samples in alone]
    assert all(part.norm() > 0 for part in parts)
    torch.testing.assert_close(sum(parts), total, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["hidden", "logits"])
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_payloads_of_bfloat16_train_to_the_bits_of_the_same_numbers_in_float32(kind, head_dtype):
    config = distilling(kind)
    generator = torch.Generator().manual_seed(0)
    heads = [Head(torch.randn(VOCAB_SIZE, 5, generator=generator).to(head_dtype))] * 2
    policy = PolicyModel(tiny_model(tied=True))
    wide = taught((0, 1), kind, (5, 5), (VOCAB_SIZE,) * 2)
    narrow = replace(wide, dense={name: rows.bfloat16() for name, rows in wide.dense.items()})
    wide = replace(wide, dense={name: rows.float() for name, rows in narrow.dense.items()})
    found = [gradient(policy, config, each, heads=heads, kind=kind) for each in (narrow, wide)]
    assert found[0].norm() > 0 and torch.equal(*found)
