"""With all tokens of the vocabulary, values and gradients are those of TRL and of Liger.

TRL 1.16's `GKDTrainer.generalized_jsd_loss`, Liger 0.8's `LigerFusedLinearJSDLoss`: their beta is
our alpha, the weight of the teacher in m and of its KL, with the same cases at 0 and 1. Both divide
a sum over tokens by their number (`batchmean`, the valid labels), where we leave the sum to the
denominator of the step; Liger adds a cross-entropy, here with weight 0. None multiplies by τ².
"""

import importlib

import pytest
import torch
from dense import ALPHAS, TEMPERATURES, draw
from test_head_terms import make_term, through_the_head, top_k_rows

V, C, HIDDEN = 48, 6, 5


@pytest.fixture(scope="module")
def trl_jsd():
    """TRL's loss; its trainer would import a vLLM that it does not support yet."""
    import_utils = importlib.import_module("trl.import_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        from trl.experimental.gkd.gkd_trainer import GKDTrainer
    return GKDTrainer.generalized_jsd_loss


@pytest.fixture(scope="module")
def liger_jsd():
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    return LigerFusedLinearJSDLoss


def ours(kind, policy, teacher, *, alpha, temperature):
    """Value [C], and the gradient of their weighted sum by logits."""
    rows = {"teacher.logits": teacher}
    if kind == "topk":
        rows = top_k_rows(teacher, V, temperature=temperature)
    return through_the_head(policy, make_term(kind, alpha=alpha, temperature=temperature), rows)


@pytest.mark.parametrize("kind", ["topk", "logits"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_it_is_trl_s_generalised_jsd(trl_jsd, alpha, temperature, kind):
    policy, teacher = draw(C, V, seed=6)
    leaf = policy.clone().requires_grad_()
    each = [
        trl_jsd(leaf[c][None, None], teacher[c][None, None], beta=alpha, temperature=temperature)
        for c in range(C)
    ]
    sum((c + 1) * value for c, value in enumerate(each)).backward()
    value, gradient = ours(kind, policy, teacher, alpha=alpha, temperature=temperature)
    torch.testing.assert_close(value, torch.stack(each).detach(), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind", ["topk", "logits"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_it_is_liger_s_fused_jsd(liger_jsd, alpha, temperature, kind):
    """Through heads of its own, whose gradient by hidden states is compared."""
    policy, teacher = draw(C, V, seed=7)
    theirs = liger_jsd(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=alpha, temperature=temperature,
        compiled=False, chunk_size=2,
    )  # fmt: skip
    eye, labels = torch.eye(V, dtype=torch.float64), torch.zeros(C, dtype=torch.int64)
    leaf = policy.clone().requires_grad_()
    loss = theirs(leaf, eye, teacher, eye, labels)
    loss.backward()
    value, gradient = ours(kind, policy, teacher, alpha=alpha, temperature=temperature)
    assert value.mean().item() == pytest.approx(loss.item(), rel=1e-6)
    gradient = gradient / torch.arange(1, C + 1)[:, None] / C
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-6, atol=1e-12)
