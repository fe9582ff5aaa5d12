"""Real FSDP2 ranks over gloo against one float64 pass."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import (
    make_sample,
    oracle_gradient,
    oracle_twin,
    random_samples,
    relative_difference,
    tiny_model,
)
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from async_grpo.config.train import TrainConfig
from async_grpo.model.collate import collate
from async_grpo.model.loading import load_policy
from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.training.export import export_hf
from async_grpo.training.fsdp import compute_dtype, iter_full_tensors, shard
from async_grpo.training.step import (
    NO_SAMPLES,
    NON_FINITE,
    GradientStep,
    make_loss,
    make_optimizer,
    make_scheduler,
)

CONFIG = TrainConfig(
    model_name_or_path="m",
    data_path="d",
    max_staleness=1,
    kl_coefficient=0.1,
    learning_rate=1e-2,
    loss_chunksize=7,
    num_warmup_steps=5,
)
FORMULA = {
    "denominator": "behaviour",
    "clip": (0.2, 0.2),
    "kl_coefficient": 0.1,
    "kl_estimator": "k3",
    "aggregation": "sample-mean",
    "constant_length": 0,
    "temperature": 1.0,
}


def make_samples(model):
    """Five short samples and one that is as long as the model can read."""
    rng = np.random.default_rng(3)
    short = random_samples(rng, 5, model=oracle_twin(model))
    tokens = rng.integers(64, size=200)
    values = rng.normal(-3, 0.1, size=(2, 199))
    return [
        *short,
        make_sample(
            tokens[:1], tokens[1:], behaviour=values[0], reference=values[1], advantage=0.7
        ),
    ]


def rounds_of(rank, num_ranks, samples):
    """Two rounds: in the first the last rank has nothing, in the second it has the long sample."""
    first = [samples[:2], *([[]] * (num_ranks - 1))]
    second = [samples[2:5], *([[]] * (num_ranks - 2)), samples[5:]]
    if num_ranks == 1:
        return [samples[:2], samples[2:]]
    return [first[rank], second[rank]]


def make_step(*, tied, **options):
    policy = PolicyModel(tiny_model(tied=tied))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard(policy, mesh, **options)
    return equip(policy), policy


def equip(policy):
    optimizer = make_optimizer(policy, CONFIG)
    return GradientStep(
        policy,
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, CONFIG),
        loss=make_loss(CONFIG),
        temperature=1.0,
        chunk_size=CONFIG.loss_chunksize,
        max_grad_norm=CONFIG.max_grad_norm,
    )


def whole(policy):
    return {n: p.detach().full_tensor().clone() for n, p in hf_named_parameters(policy)}


def gradient_of(policy, denominator):
    return {n: p.grad.full_tensor() / denominator for n, p in hf_named_parameters(policy)}


def accumulate(step, rank, samples):
    for part in rounds_of(rank, dist.get_world_size(), samples):
        step.accumulate(collate(part, aggregation="sample-mean"))


def one_step(rank, *, tied, **options):
    """A streamed step over the ranks: its gradient, its result, the parameters after it."""
    samples = make_samples(tiny_model(tied=tied))
    step, policy = make_step(tied=tied, **options)
    accumulate(step, rank, samples)
    gradient = gradient_of(policy, len(samples))
    result = step.finish(len(samples))
    return {"gradient": gradient, "result": result, "parameters": whole(policy)}


def skipped_steps(rank):
    """A step that is not finite on one rank only, one without samples, then a real one."""
    samples = make_samples(tiny_model(tied=True))
    step, policy = make_step(tied=True)
    before = whole(policy)
    packed = collate(samples[:2], aggregation="sample-mean")
    if rank == 1:
        packed.advantages[0] = math.nan
    step.accumulate(packed)
    results = [step.finish(4)]
    step.accumulate(collate([], aggregation="sample-mean"))
    results.append(step.finish(0))
    unmoved = all(torch.equal(before[name], now) for name, now in whole(policy).items())
    accumulate(step, rank, samples)
    results.append(step.finish(len(samples)))
    return {"results": results, "unmoved": unmoved}


def gathered(rank, *, source, target):
    """What rank 0 receives of whole parameters after an evaluation in bf16, and an export."""
    _, policy = make_step(tied=True, mixed_precision="bf16")
    with torch.no_grad():
        policy(collate([], aggregation="sample-mean"), temperature=1.0, chunk_size=1)
    names = [(name, tensor.clone()) for name, tensor in iter_full_tensors(policy)]
    export_hf(policy, source_folder=source, target=target)
    return names


def two_ranks(rank, *, source, target):
    """Every scenario in one pair of processes: starting them costs more than running them."""
    return {
        "tied": one_step(rank, tied=True),
        "untied": one_step(rank, tied=False),
        "checkpointing": one_step(rank, tied=True, activation_checkpointing=True),
        "bf16": one_step(rank, tied=True, mixed_precision="bf16"),
        "skipped": skipped_steps(rank),
        "gathered": gathered(rank, source=source, target=target),
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What both ranks of each scenario say, and where the export is."""
    folder = tmp_path_factory.mktemp("ranks")
    source, target = folder / "source", folder / "target"
    tiny_model(tied=True).save_pretrained(source)
    ranks = run_ranks(two_ranks, num_ranks=2, folder=folder, source=str(source), target=str(target))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]} | {"target": target}


def assert_equals_oracle(ranks, *, tied, tolerance):
    model = tiny_model(tied=tied)
    samples = make_samples(model)
    expected = oracle_gradient(model, samples, **FORMULA)
    norm = torch.stack([value.norm() for value in expected.values()]).norm().item()
    for rank in ranks:
        assert relative_difference(rank["gradient"], expected) < tolerance
        assert rank["result"] == ranks[0]["result"]
        assert rank["result"].skipped == ""
        assert rank["result"].grad_norm == pytest.approx(norm, rel=max(tolerance, 1e-5))
        assert rank["result"].metrics["trained_samples"] == len(samples)
        for name, value in rank["parameters"].items():
            assert torch.equal(value, ranks[0]["parameters"][name])
    moved = ranks[0]["parameters"]
    assert any(not torch.equal(moved[name], value) for name, value in model.named_parameters())


@pytest.mark.integration
@pytest.mark.parametrize("scenario", ["tied", "untied", "checkpointing"])
def test_two_ranks_give_the_oracle_s_gradient_and_stay_equal(scenario, pair):
    assert_equals_oracle(pair[scenario], tied=scenario != "untied", tolerance=1e-5)


@pytest.mark.integration
def test_metrics_of_two_ranks_are_those_of_one_process(pair):
    policy = PolicyModel(tiny_model(tied=True))
    step = equip(policy)
    samples = make_samples(policy.model)
    step.accumulate(collate(samples, aggregation="sample-mean"))
    expected = step.finish(len(samples)).metrics
    assert expected["mismatch_max"] > 1
    assert pair["tied"][0]["result"].metrics == pytest.approx(expected, rel=1e-4)


@pytest.mark.integration
def test_bf16_compute_keeps_float32_weights_and_stays_near(pair):
    ranks = pair["bf16"]
    assert_equals_oracle(ranks, tied=True, tolerance=0.1)
    assert all(value.dtype == torch.float32 for value in ranks[0]["parameters"].values())
    assert all(value.dtype == torch.float32 for value in ranks[0]["gradient"].values())


@pytest.mark.integration
def test_one_rank_takes_the_same_path(tmp_path):
    ranks = run_ranks(one_step, num_ranks=1, folder=tmp_path, tied=True)
    assert_equals_oracle(ranks, tied=True, tolerance=1e-5)


@pytest.mark.integration
def test_compiled_layers_give_the_same_gradient(tmp_path):
    ranks = run_ranks(one_step, num_ranks=1, folder=tmp_path, tied=True, compile=True)
    assert_equals_oracle(ranks, tied=True, tolerance=1e-5)


@pytest.mark.integration
def test_all_ranks_skip_together_when_one_gradient_is_not_finite(pair):
    for rank in pair["skipped"]:
        first, second, third = rank["results"]
        assert [step.skipped for step in rank["results"]] == [NON_FINITE, NO_SAMPLES, ""]
        assert rank["unmoved"]
        assert first.learning_rate == second.learning_rate == third.learning_rate


@pytest.mark.integration
def test_rank_0_receives_whole_parameters_and_exports_them(pair):
    received, nothing = pair["gathered"]
    model = tiny_model(tied=True)
    assert nothing == []
    assert [name for name, _ in received] == [name for name, _ in model.named_parameters()]
    exported = load_policy(str(pair["target"]), attention="packed", dtype=torch.float32).model
    for (_, got), stored, want in zip(
        received, exported.parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(got, want)
        assert torch.equal(stored, want)


def test_precision_follows_the_option_and_the_device():
    cpu = torch.device("cpu")
    types = [compute_dtype(choice, cpu) for choice in ("auto", "no", "bf16")]
    assert types == [torch.float32, torch.float32, torch.bfloat16]
