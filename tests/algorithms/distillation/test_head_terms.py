"""Values and gradients of the teachers' terms equal float64 autograd on dense tensors."""

import dense
import pytest
import torch
from dense import ALPHAS, TEMPERATURES, draw, relative
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensor_watchers import LargestTensor

from async_grpo.algorithms.base import Teacher
from async_grpo.algorithms.distillation_loss import head_term, top_k_with_tail
from async_grpo.model.lm_head import Head, Rescaling
from async_grpo.model.logprobs import token_logprobs
from async_grpo.types import Payload

V, C, HIDDEN = 48, 6, 5
PRECISIONS = {torch.float64: 1e-12, torch.float32: 1e-5}


def make_term(kind="topk", *, alpha, temperature=1.0, policy_temperature=1.0, widths=(V,), **of):
    teachers = [Teacher(width, **of) for width in widths]
    payload = Payload(kind, 0, temperature)
    return head_term(payload, teachers, alpha=alpha, policy_temperature=policy_temperature)


def top_k_rows(logits, k, *, temperature=1.0, width=0, dtype=torch.float64):
    """What a teacher says of its logits, as a rank holds it."""
    ids, logprobs, tail = top_k_with_tail(logits.to(dtype), k, temperature=temperature, width=width)
    assert (ids.dtype, logprobs.dtype) == (torch.int32, dtype)
    return {"teacher.ids": ids.long(), "teacher.logprobs": logprobs, "teacher.tail": tail}


def through_the_head(logits, term, rows, *, policy_temperature=1.0, chunk_size=4):
    """Value [C], and the gradient of Σ (c + 1) value_c by the logits [C, V], as a rank computes it.

    The head is the identity: hidden states are logits.
    """
    hidden = logits.clone().requires_grad_()
    eye = torch.eye(logits.shape[-1], dtype=logits.dtype)
    got = token_logprobs(
        hidden, Head(eye), torch.zeros(len(logits), dtype=torch.int64), chunk_size=chunk_size,
        temperature=policy_temperature, terms=(term,), rows=rows,
    )  # fmt: skip
    value = got.terms["divergence"]
    (torch.arange(1, len(logits) + 1) * value).sum().backward()
    return value.detach(), hidden.grad


def expected(policy, teacher, **options):
    policy = policy.clone().requires_grad_()
    value = dense.divergence(policy, teacher, **options)
    (torch.arange(1, len(policy) + 1) * value).sum().backward()
    return value.detach(), policy.grad


def assert_equal(got, want, tolerance):
    for name, mine, theirs in zip(("value", "gradient"), got, want, strict=True):
        assert relative(mine, theirs) <= tolerance, name


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("policy_temperature", [1.0, 0.7])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("k", [1, 8, V])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_top_k_with_a_tail_is_autograd_s(alpha, k, temperature, policy_temperature, dtype):
    policy, teacher = draw(C, V, seed=0)
    rows = top_k_rows(teacher, k, temperature=temperature, dtype=dtype)
    term = make_term(alpha=alpha, temperature=temperature, policy_temperature=policy_temperature)
    got = through_the_head(policy.to(dtype), term, rows, policy_temperature=policy_temperature)
    ids = rows["teacher.ids"]
    want = expected(policy, teacher, alpha=alpha, temperature=temperature, ids=ids)
    assert_equal(got, want, PRECISIONS[dtype])


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("kind", ["logits", "hidden"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_whole_vocabulary_is_autograd_s(alpha, temperature, kind, dtype):
    policy, _ = draw(C, V, seed=1)
    generator = torch.Generator().manual_seed(1)
    hidden, head, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((C, HIDDEN), (V, HIDDEN), (V,))
    )
    rescaling = Rescaling(factor=1.5, softcap=2.0)
    logits = rescaling.apply_(hidden @ head.T + bias)
    own = Head(head.to(dtype), bias.to(dtype), rescaling)
    teacher = {"head": own} if kind == "hidden" else {}
    row = hidden if kind == "hidden" else logits
    rows = {f"teacher.{kind}": row.to(dtype)}
    term = make_term(kind, alpha=alpha, temperature=temperature, policy_temperature=0.7, **teacher)
    got = through_the_head(policy.to(dtype), term, rows, policy_temperature=0.7)
    want = expected(policy, logits, alpha=alpha, temperature=temperature)
    assert_equal(got, want, PRECISIONS[dtype])


@pytest.mark.parametrize("kind", ["topk", "logits"])
@pytest.mark.parametrize("of_teacher", [0.5, 3.0])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_teacher_s_own_temperature_is_its_distribution_s_alone(alpha, of_teacher, kind):
    policy, teacher = draw(C, V, seed=2)
    rows = {"teacher.logits": teacher}
    if kind == "topk":
        rows = top_k_rows(teacher, 8, temperature=of_teacher)
    term = head_term(
        Payload(kind, 0, of_teacher), [Teacher(V)], alpha=alpha, policy_temperature=0.7,
        temperature=2.0,
    )  # fmt: skip
    got = through_the_head(policy, term, rows, policy_temperature=0.7)
    both = {"temperature": 2.0, "of_teacher": of_teacher, "ids": rows.get("teacher.ids")}
    assert_equal(got, expected(policy, teacher, alpha=alpha, **both), 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["topk", "hidden", "logits"]),
    widths=st.lists(st.sampled_from([9, V - 3, V, V + 9]), min_size=1, max_size=3),
    num_tokens=st.integers(1, 9),
    chunk_size=st.integers(1, 10),
    alpha=st.sampled_from(ALPHAS),
    temperature=st.sampled_from(TEMPERATURES),
    seed=st.integers(0, 1000),
)
@example(
    kind="hidden", widths=[V, V], num_tokens=9, chunk_size=4, alpha=0.5, temperature=2.0, seed=0
)
def test_each_token_is_compared_over_the_columns_that_its_teacher_and_the_policy_have(
    kind, widths, num_tokens, chunk_size, alpha, temperature, seed
):
    """Any number of teachers in a minibatch, of any widths, for any chunk."""
    generator = torch.Generator().manual_seed(seed)
    policy, _ = draw(num_tokens, V, seed=seed)
    index = torch.randint(len(widths), (num_tokens,), generator=generator)
    heads = [torch.randn(w, HIDDEN, generator=generator, dtype=torch.float64) for w in widths]
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64)
    logits = [heads[number] @ hidden[c] for c, number in enumerate(index)]
    of_a_wider_one = torch.full((num_tokens, 3), 5.0, dtype=torch.float64)
    rows = {"teacher.index": index, "teacher.hidden": torch.cat([hidden, of_a_wider_one], dim=-1)}
    if kind == "logits":  # of narrower teachers there are columns that nobody reads
        filled = [torch.cat([own, own.new_full((V + 9 - len(own),), 5.0)]) for own in logits]
        rows |= {"teacher.logits": torch.stack(filled)}
    if kind == "topk":
        parts = [top_k_rows(own[None], 8, temperature=temperature, width=V) for own in logits]
        rows |= {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    teachers = [
        Teacher(width, head=Head(head) if kind == "hidden" else None)
        for width, head in zip(widths, heads, strict=True)
    ]
    payload = Payload(kind, 0, temperature)
    term = head_term(payload, teachers, alpha=alpha, policy_temperature=1.0)
    value, gradient = through_the_head(policy, term, rows, chunk_size=chunk_size)
    for c, own in enumerate(logits):
        ids = rows["teacher.ids"][c : c + 1] if kind == "topk" else None
        want = expected(policy[c : c + 1], own[None], alpha=alpha, temperature=temperature, ids=ids)
        # One token's own gradient may be nearly 0: a little of its digits goes.
        assert_equal((value[c : c + 1], gradient[c : c + 1] / (c + 1)), want, 1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_what_is_rounded_to_float32_on_its_way_is_the_constant_of_an_exact_gradient(alpha):
    """The teacher's cells are then not 1 together, and stay what they are."""
    policy, teacher = draw(C, V, seed=8)
    rows = top_k_rows(teacher, 8, temperature=2.0, dtype=torch.float32)
    got = through_the_head(policy, make_term(alpha=alpha, temperature=2.0), rows)
    leaf = policy.clone().requires_grad_()
    p = dense.cells((leaf / 2).softmax(-1), rows["teacher.ids"])
    said = [rows["teacher.logprobs"], rows["teacher.tail"][:, None]]
    q = torch.cat(said, dim=-1).double().exp()
    want = dense.jsd(p, q, alpha)
    (torch.arange(1, C + 1) * want).sum().backward()
    assert relative(got[1], leaf.grad) <= 1e-12
    # At the ends Σ (q - p) is part of the value, and no longer 0.
    assert relative(got[0], want.detach()) <= (1e-12 if 0 < alpha < 1 else 1e-6)


@pytest.mark.parametrize("alpha", [0.001, 0.999])
def test_a_mixture_of_almost_one_side_alone_is_exact_too(alpha):
    policy, teacher = draw(200, V, seed=9, scale=8.0)
    logprobs = policy.log_softmax(-1)
    term = make_term("logits", alpha=alpha)
    got = term.value(logprobs.float(), {"teacher.logits": teacher.float()})
    want = dense.divergence(policy, teacher, alpha=alpha, temperature=1.0)
    assert ((got.double() - want).abs() <= 1e-5 * want + 1e-9).all()


def test_d_is_never_negative_grows_with_k_and_is_bounded_by_all_of_them():
    """10,000 draws, and among them policies near their teacher, for every K."""
    policy, teacher = draw(10_000, 12, seed=3, scale=6.0)
    policy[::4] = teacher[::4] + 1e-4 * policy[::4]
    logprobs = policy.log_softmax(-1)
    for alpha in ALPHAS:
        values = [
            make_term(alpha=alpha, widths=(12,)).value(logprobs, top_k_rows(teacher, k))
            for k in range(1, 13)
        ]
        term = make_term("logits", alpha=alpha, widths=(12,))
        values = torch.stack([*values, term.value(logprobs, {"teacher.logits": teacher})])
        assert (values >= 0).all()
        # To the rounding of numbers of this size.
        assert (values.diff(dim=0) >= -1e-14 * (1 + values[1:])).all()
        assert values.isfinite().all()


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_equal_distributions_give_nothing_to_learn(alpha, temperature, dtype):
    """To the square of what a float rounds, in the value."""
    logits, _ = draw(2000, V, seed=4, scale=8.0)
    for kind, rows in (
        ("topk", top_k_rows(logits, 8, temperature=temperature, dtype=dtype)),
        ("logits", {"teacher.logits": logits.to(dtype)}),
    ):
        term = make_term(kind, alpha=alpha, temperature=temperature)
        value, gradient = through_the_head(logits.to(dtype), term, rows, chunk_size=2000)
        rounding = torch.finfo(dtype).eps
        assert value.min() >= 0 and value.max() <= (50 * rounding) ** 2
        assert (gradient.norm(dim=-1) <= 50 * rounding * torch.arange(1, 2001) / temperature).all()


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_policy_that_is_sure_of_something_else_still_gets_its_gradient(alpha, k):
    """In float32 its tail is exp(-120): q / p would be infinite (probes.md, 9)."""
    policy, teacher = torch.zeros(2, 1, V)
    policy[0, 3], teacher[0, 5] = 120.0, 4.0
    rows = top_k_rows(teacher, k, dtype=torch.float32)
    got = through_the_head(policy, make_term(alpha=alpha), rows)
    of_all = {"alpha": alpha, "temperature": 1.0, "ids": rows["teacher.ids"]}
    value, gradient = expected(policy.double(), teacher.double(), **of_all)
    gradient[gradient.abs() < 1e-38] = 0  # which float32 has not
    assert_equal(got, (value, gradient), 1e-5)
    assert (got[1].norm() > 0.5) == (alpha == 0)


def test_a_tail_of_almost_nothing_is_a_sum_over_what_it_holds():
    logits = torch.zeros(1, V)
    logits[0, :4] = 30.0
    rows = top_k_rows(logits, 4, dtype=torch.float32)
    exact = torch.tensor(V - 4.0).log() - (4 * torch.tensor(30.0).double().exp() + V - 4).log()
    assert rows["teacher.tail"].item() == pytest.approx(exact.item(), rel=1e-6)
    whole = top_k_rows(logits, V, dtype=torch.float32)
    assert whole["teacher.tail"].item() == -torch.inf


def test_a_token_that_a_teacher_excludes_costs_much_and_not_all():
    """Its logit is -inf, and finite numbers are made of it."""
    policy, teacher = draw(2, V, seed=5)
    teacher[:, 7] = -torch.inf
    for alpha in ALPHAS:
        for kind, rows in (
            ("logits", {"teacher.logits": teacher.float()}),
            ("topk", top_k_rows(teacher, V, dtype=torch.float32)),
        ):
            value, gradient = through_the_head(policy.float(), make_term(kind, alpha=alpha), rows)
            assert value.isfinite().all() and gradient.isfinite().all()


def test_more_tokens_than_the_vocabulary_has_are_refused():
    with pytest.raises(ValueError, match=r"k must not exceed the 9 tokens .* got 10: lower --gkd"):
        top_k_with_tail(torch.zeros(2, V), 10, temperature=1.0, width=9)


@pytest.mark.parametrize("kind", ["topk", "hidden", "logits"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_no_tensor_is_larger_than_one_chunk_of_logits(kind, alpha):
    num_tokens, vocab, chunk_size = 200, 300, 8
    hidden, weight = (torch.randn(size, HIDDEN, requires_grad=True) for size in (num_tokens, vocab))
    rows = {"teacher.hidden": torch.randn(num_tokens, HIDDEN)}
    teacher_logits = torch.randn(num_tokens, vocab)
    if kind == "topk":
        rows = top_k_rows(teacher_logits, 16, dtype=torch.float32)
    if kind == "logits":
        rows = {"teacher.logits": teacher_logits}
    of = {"head": Head(torch.randn(vocab, HIDDEN))} if kind == "hidden" else {}
    term = make_term(kind, alpha=alpha, temperature=2.0, widths=(vocab,), **of)
    with LargestTensor() as largest:
        targets = torch.zeros(num_tokens, dtype=torch.int64)
        got = token_logprobs(
            hidden, Head(weight), targets, temperature=0.9, chunk_size=chunk_size, terms=(term,),
            rows=rows,
        )  # fmt: skip
        (got.terms["divergence"].sum() + got.logprobs.sum()).backward()
    assert largest.num_elements == chunk_size * vocab
