"""What is sent of an adapter is compared, in the worker, with what the policy computes with.

Held fixed: the policy. Free: what goes wrong between it and the engine, the update, the type. The
live model is a plain one here; engines of vLLM are in tests/rollout/test_engine_adapters.py.
"""

import copy

import numpy as np
import pytest
import torch
from adapted_models import adapted
from effort import FULL
from oracle import tiny_model

from async_grpo.model.adapters import NAME, adapted_layers
from async_grpo.model.policy import trained_parameters
from async_grpo.model.served import _Factors, changed, probing, samples, served
from async_grpo.types import CanaryRow, PublishReport, WeightsAck, WeightsSnapshot, WeightsVersion
from async_grpo.weight_sync.sync_report import probe_complaints
from async_grpo.weight_sync.update_checks import Readback

NUM_CASES = 100 if FULL else 10


def with_factors(policy, change):
    """What would be sent if the factors of each layer were other ones."""
    wrong = copy.deepcopy(policy)
    with torch.no_grad():
        for name, layer in adapted_layers(wrong):
            change(name, layer, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
    return {name: each.make() for name, each in changed(wrong).items()}


def doubled(path, layer, a, b):
    b *= 2


def withheld(path, layer, a, b):
    b.zero_()


def wrongly_scaled(path, layer, a, b):
    layer.scaling[NAME] *= layer.r[NAME] ** 0.5


def one_missing(path, layer, a, b):
    if "1.mlp.up_proj" in path:
        b.zero_()


def transposed(path, layer, a, b):
    a.copy_(a.flip(0).roll(1, dims=1))


SABOTAGES = {
    "withheld": withheld, "doubled": doubled, "wrongly scaled": wrongly_scaled,
    "one layer missing": one_missing, "mixed up": transposed,
}  # fmt: skip


def updated(policy, rng, size):
    """An optimizer's step: every number moves by about as much."""
    with torch.no_grad():
        for _, parameter in trained_parameters(policy):
            moved = rng.choice([-1.0, 1.0], parameter.shape)
            parameter += size * torch.from_numpy(moved).to(parameter.dtype)


def found(sent, policy, *, dtype, seed):
    """Tensors of which a model that was sent these differs from the policy's samples."""
    live = tiny_model(tied=True, dtype=dtype)
    held = dict(live.named_parameters())
    for name, tensor in sent.items():
        held[name].data.copy_(tensor)
    own, lost, total = samples(policy, alone=False, dtype=dtype, served=dtype, seed=seed)
    assert total > 0 and lost >= 0
    shapes = {name: each.shape for name, each in served(policy).items()}
    return Readback(live, seed=0).differing_samples(own, shapes)


def a_policy(rng, dtype):
    base = tiny_model(tied=True, dtype=dtype)
    policy = adapted(base, seed=int(rng.integers(1 << 30)), starts=True, lora_rank=4).float()
    for _ in range(3):
        updated(policy, rng, 1e-3)
    return policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_sent_as_it_is_differs_nowhere(dtype):
    for seed in range(NUM_CASES):
        policy = a_policy(np.random.default_rng(seed), dtype)
        right = {name: each.make() for name, each in changed(policy).items()}
        assert not found(right, policy, dtype=dtype, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*SABOTAGES, "stale"])
def test_sabotage_is_found_in_the_same_update(kind, dtype):
    for seed in range(NUM_CASES):
        rng = np.random.default_rng(seed)
        policy = a_policy(rng, dtype)
        if kind == "stale":
            wrong = {name: each.make() for name, each in changed(policy).items()}
            updated(policy, rng, 1e-3)
        else:
            wrong = with_factors(policy, SABOTAGES[kind])
        names = found(wrong, policy, dtype=dtype, seed=seed)
        expected = {n for n in wrong if kind != "one layer missing" or "1.mlp.up_proj" in n}
        assert {*names} == expected


def test_a_mistake_in_the_merge_itself_is_found(monkeypatch):
    policy, right = a_policy(np.random.default_rng(0), torch.float32), _Factors.of
    monkeypatch.setattr(
        _Factors, "of", lambda layer: right(layer)._replace(left=2 * right(layer).left)
    )
    wrong = {name: each.make() for name, each in changed(policy).items()}
    assert {*found(wrong, policy, dtype=torch.float32, seed=0)} == wrong.keys()


def scored(values):
    return CanaryRow(np.arange(4, dtype=np.int32), np.array(values, dtype=np.float32))


@pytest.mark.parametrize(
    ("answer", "is_found"),
    [
        ([-3.0, -1.0, -2.01], False),
        ([-1.0, -1.0, -1.0], True),
        ([-2.0, -1.0, -1.5], True),
        ([], True),
    ],
)
def test_an_engine_without_the_probe_is_found_before_step_0(answer, is_found):
    version = WeightsVersion(1, -1)
    assert WeightsVersion.parse(str(version)) == version < WeightsVersion(1, 0)
    snapshot = WeightsSnapshot(version, (), canary=(scored([-3, -1, -2]),))
    canary = (np.array(answer, dtype=np.float32),) if answer else ()
    ack = WeightsAck("w", version, 0.0, 0.0, canary=canary)
    complaints = probe_complaints(
        snapshot, PublishReport(version, (ack,), {}), (scored([-1, -1, -1]),)
    )
    assert bool(complaints) == is_found


def test_the_probe_changes_every_layer_and_leaves_nothing_behind():
    policy = adapted(tiny_model(tied=True), starts=True, lora_rank=4)
    before = {name: each.make().clone() for name, each in served(policy).items()}
    with probing(policy):
        for name, each in changed(policy).items():
            share = (each.make() - before[name]).norm() / before[name].norm()
            assert 0.3 < share < 0.8
    assert all(torch.equal(each.make(), before[n]) for n, each in served(policy).items())
