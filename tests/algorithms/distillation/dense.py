"""Divergences as their formulas print them: dense float64 tensors and autograd, nothing else."""

import torch

ALPHAS, TEMPERATURES = (0.0, 0.1, 0.5, 0.9, 1.0), (0.5, 1.0, 2.0)


def kl(p, q):
    return (p * (p / q).log()).sum(-1)


def jsd(p, q, alpha):
    """[C] of the policy's probabilities p and the teacher's q [C, M] (arXiv 2306.13649, eq. 1)."""
    if alpha in (0, 1):
        return kl(q, p) if alpha == 0 else kl(p, q)
    m = alpha * q + (1 - alpha) * p
    return alpha * kl(q, m) + (1 - alpha) * kl(p, m)


def cells(probs, ids):
    """[C, K + 1]: the tokens of `ids` [C, K] and all others together, where there are any."""
    is_chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, ids.long(), True)
    others = (probs * ~is_chosen).sum(-1, keepdim=True)
    parts = [probs.gather(-1, ids.long()), others]
    return torch.cat(parts[: 1 if ids.shape[-1] == probs.shape[-1] else 2], dim=-1)


def divergence(policy_logits, teacher_logits, *, alpha, temperature, of_teacher=0.0, ids=None):
    """[C] over the columns that both have; with `ids` over these and a tail.

    `of_teacher`: the teacher's temperature where it has its own.
    """
    width = min(policy_logits.shape[-1], teacher_logits.shape[-1])
    p = (policy_logits[:, :width] / temperature).softmax(-1)
    q = (teacher_logits[:, :width] / (of_teacher or temperature)).softmax(-1)
    return jsd(p, q, alpha) if ids is None else jsd(cells(p, ids), cells(q, ids), alpha)


def relative(got, expected):
    """Norm of the difference over the norm of what was expected; absolute where that is 0."""
    norm = expected.norm()
    return ((got.double() - expected).norm() / (norm if norm else 1.0)).item()


def draw(num_tokens, vocab, *, seed, scale=3.0):
    """(policy's, teacher's) logits [C, V] float64, from flat to peaked."""
    generator = torch.Generator().manual_seed(seed)
    size = (2, num_tokens, vocab)
    scales = scale * torch.rand(2, num_tokens, 1, generator=generator, dtype=torch.float64)
    return tuple(scales * torch.randn(size, generator=generator, dtype=torch.float64))
