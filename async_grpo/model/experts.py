"""Mixtures of experts: the choice of experts, its replay, what is counted of it, and its balance.

A router scores all experts for a token, and chooses some of them. An engine may choose others than
the trainer, where scores are close: then both compute with different weights. With the engine's
choices in the minibatch the trainer takes these (routing replay, as R3 of Ma et al. 2025,
arXiv:2510.11370), forward and backward. Only the choice is replaced: gates are what the model's own
router computes for the chosen experts, by its own normalisation and scale.

Legend: T packed tokens, N trained tokens, R layers with a router, E experts of a layer, K chosen.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from async_grpo.types import PackedMinibatch

OWN = -1  # in place of an expert's index: the model's own choice
SUMS = ("balance_loss_sum", "router_entropy_sum", "differing_choices", "replayed_choices")
LAYER = re.compile(r"\.(\d+)\.")
Forward = Callable[..., tuple[Tensor, ...]]  # of a router: logits, gates and indices, in any order
ROUTERS = ("TopKRouter", "TopkRouter", "ChoiceRouter", "MoEV1Gate")  # ends of names of classes
# Families whose scores are sigmoids: their share is sigmoid / sum, as in DeepSeek-V3 (arXiv:
# 2412.19437, eq. 19); of all others it is the softmax of the logits.
BY_SIGMOID = ("Deepseek", "Glm4Moe", "Dots1", "MiniMaxM2", "SolarOpen", "Afmoe", "ExaoneMoe")


class Routing:
    """The routers of one model, in order of layers; told of each forward before it begins."""

    def __init__(self, routers: Mapping[int, nn.Module], *, num_experts: int, top_k: int) -> None:
        """{index of its layer: router}; each of them has so many experts, and chooses `top_k`."""
        self.num_layers, self.num_experts, self.top_k = len(routers), num_experts, top_k
        # α of the balancing loss, and the share f [R, E] of tokens that each expert had before.
        self.coefficient = 0.0
        self.shares = torch.full(self.shape, 1 / self.num_experts, dtype=torch.float64)
        self._packed: PackedMinibatch | None = None
        self._seen: set[int] = set()  # layers of this forward: a second time they are recomputed
        self._sums = dict.fromkeys(SUMS, torch.zeros(()))
        self._choices = torch.zeros(self.shape, dtype=torch.float64)  # of trained tokens
        self.own: dict[int, Tensor] = {}  # own choices [T, K] of the latest, without gradients
        self._places = [*routers]
        for number, router in enumerate(routers.values()):
            router.forward = functools.partial(self._route, number, router, router.forward)

    @classmethod
    def of(cls, model: nn.Module) -> Routing | None:
        """The routing of a mixture of experts; None for a dense model.

        None as well where no router of the model is known: then it chooses by itself.
        """
        found = {
            int(layer[1]): module
            for name, module in model.named_modules()
            if type(module).__name__.endswith(ROUTERS)
            if "topk" in type(module).forward.__code__.co_names  # others choose otherwise
            if (layer := LAYER.search(name))
        }
        alike = {
            tuple(getattr(each, n) for n in ("num_experts", "top_k")) for each in found.values()
        }
        if len(alike) != 1:
            return None
        ((num_experts, top_k),) = alike
        return cls(found, num_experts=num_experts, top_k=top_k)

    @property
    def shape(self) -> tuple[int, int]:
        """(R, E)."""
        return self.num_layers, self.num_experts

    def begin(self, packed: PackedMinibatch) -> None:
        """A forward over `packed` begins; its backward pass may recompute layers until the next."""
        self._packed, self._seen, self.own = packed, set(), {}

    def take(self) -> dict[str, Tensor]:
        """Sums over the forwards with gradients since the last call."""
        sums, self._sums = self._sums, dict.fromkeys(SUMS, torch.zeros(()))
        return sums

    def take_choices(self) -> Tensor:
        """How often each expert was chosen for trained tokens since the last call, [R, E]."""
        choices, self._choices = self._choices, torch.zeros_like(self._choices)
        return choices

    @torch.compiler.disable  # a mode that watches single operations
    def _route(
        self, layer: int, router: nn.Module, forward: Forward, *args: object, **options: object
    ) -> tuple[Tensor, ...]:
        """The router's own forward, with the choices of the minibatch in place of its own."""
        packed = self._packed
        given = None
        if packed is not None and packed.experts is not None:
            of_layers = packed.experts.unflatten(1, (-1, self.top_k))  # of all, also of dense ones
            given = of_layers[:, self._places[layer]]
        with _Choice(self.num_experts, self.top_k, given) as choice:
            outputs = forward(*args, **options)
        assert choice.own is not None
        if not torch.is_grad_enabled():
            self.own[self._places[layer]] = choice.own
        is_first = layer not in self._seen
        self._seen.add(layer)
        if packed is None or not torch.is_grad_enabled() or not packed.num_rows:
            return outputs
        place, logits = next(
            (i, out) for i, out in enumerate(outputs) if out.shape[-1] == self.num_experts
        )
        shares = _shares(router, logits)
        if is_first:
            self._count(layer, choice, shares.detach(), packed)
        if not self.coefficient:
            return outputs
        loss = self._balance(layer, shares, packed)
        if is_first:
            self._add("balance_loss_sum", loss.detach())
        gates = next(i for i, out in enumerate(outputs) if i != place and out.is_floating_point())
        return tuple(
            _WithLoss.apply(out, loss) if i == gates else out for i, out in enumerate(outputs)
        )

    def _balance(self, layer: int, shares: Tensor, packed: PackedMinibatch) -> Tensor:
        """α E Σ_n w_n Σ_e f_e p_ne over the positions n of trained tokens, of one layer.

        The loss of Switch Transformers (Fedus et al. 2021, eq. 4) as a sum over tokens: f is of
        the step before, a constant, so that it does not matter how the tokens are divided.
        """
        before = self.shares[layer].to(shares)
        chosen = shares.index_select(0, packed.logit_positions)
        weights = packed.weights.to(shares.dtype)
        return self.coefficient * self.num_experts * (weights @ (chosen @ before))

    @torch.no_grad()
    def _count(self, layer: int, choice: _Choice, shares: Tensor, packed: PackedMinibatch) -> None:
        own, used = choice.own, choice.used
        assert own is not None and used is not None
        trained = used.index_select(0, packed.logit_positions).flatten()
        self._choices = self._choices.to(used.device)
        self._choices[layer] += torch.bincount(trained, minlength=self.num_experts)
        of_tokens = shares.index_select(0, packed.logit_positions)
        self._add("router_entropy_sum", torch.special.entr(of_tokens).sum() / self.num_layers)
        if choice.given is not None:
            is_given = choice.given >= 0
            is_other = (own[:, :, None] != choice.given[:, None, :]).all(-1) & is_given
            self._add("differing_choices", is_other.sum())
            self._add("replayed_choices", is_given.sum())

    def _add(self, name: str, amount: Tensor) -> None:
        self._sums[name] = self._sums[name].to(amount) + amount


class _Choice(TorchFunctionMode):
    """Within, the choice of K of E experts is `given` [T, K] where that is not `OWN`."""

    def __init__(self, num_experts: int, top_k: int, given: Tensor | None) -> None:
        super().__init__()
        self._num_experts, self._top_k = num_experts, top_k
        self.given = given
        self.own: Tensor | None = None  # [T, K]
        self.used: Tensor | None = None  # [T, K]

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, indices = args[0], result[1]
        # Of groups of experts there are fewer, or they have a dimension of their own.
        if (
            scores.ndim != 2
            or scores.shape[1] != self._num_experts
            or indices.shape[1] != self._top_k
        ):
            return result
        self.own = self.used = indices
        if self.given is None:
            return result
        given = self.given.to(indices.dtype)
        self.used = torch.where(given < 0, indices, given)
        return torch.return_types.topk((scores.gather(1, self.used), self.used))


class _WithLoss(torch.autograd.Function):
    """Passes gates on, and adds `loss` to what is back-propagated through them.

    So its gradient is computed with the layer's, while FSDP2 has the router's weights gathered.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, gates: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def _shares(router: nn.Module, logits: Tensor) -> Tensor:
    """Of each expert [T, E], in at least float32; they sum to 1."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not type(router).__name__.removeprefix("FSDP").startswith(BY_SIGMOID):
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def shares_of(choices: Tensor) -> Tensor:
    """The share f of each expert [R, E] in the choices of a step; equal ones without choices."""
    totals = choices.sum(-1, keepdim=True)
    return torch.where(totals > 0, choices / totals.clamp(min=1), 1 / choices.shape[-1])


def load_metrics(choices: Tensor) -> dict[str, float]:
    """Of the choices [R, E] of one step, over all ranks.

    >>> load_metrics(torch.tensor([[2.0, 2.0], [4.0, 0.0]]))
    {'expert_load_max': 1.5, 'dead_experts': 0.25}
    """
    return {
        "expert_load_max": float(shares_of(choices).amax(-1).mean() * choices.shape[-1]),
        "dead_experts": float((choices == 0).double().mean()),
    }
