"""A gradient step: one division, one clip, one update, or none at all."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from learners import gradient_step
from oracle import oracle_gradient, random_samples, tiny_model
from tensor_watchers import NumbersRead

from async_grpo.config.train_config import TrainConfig
from async_grpo.config.training_options import MemoryOptions, OptimizerOptions
from async_grpo.model.collate import collate
from async_grpo.model.lm_head import Head
from async_grpo.model.logprobs import token_logprobs
from async_grpo.model.policy import PolicyModel
from async_grpo.training.schedule import Clocks
from async_grpo.training.step import NO_SAMPLES, NON_FINITE, make_optimizer

REINFORCE = """
from async_grpo.algorithms.base import Algorithm, LossSums
class Reinforce(Algorithm):
    def loss(self, scored, packed):
        ratio = (scored.logprobs - packed.behaviour_logprobs).exp()
        return LossSums(-(packed.weights * packed.advantages * ratio).sum())
"""


def make_config(**changes):
    options = {
        "max_staleness": 0,
        "learning_rate": 1e-2,
        "num_warmup_steps": 4,
        "max_grad_norm": 0.05,
    }
    return TrainConfig(model_name_or_path="m", data_path="d", **(options | changes))


def make_step(policy, config):
    step = gradient_step(policy, config)
    return step, step.optimizer


def batch(model, count=4, seed=0):
    rng = np.random.default_rng(seed)
    return random_samples(rng, count, model=model)


def parameters_of(policy):
    return {name: value.detach().clone() for name, value in policy.named_parameters()}


def pack(samples):
    return collate(samples, aggregation="sample-mean", dtype=torch.float64)


def test_update_equals_clipped_adamw_on_the_oracle_gradient():
    config = make_config(weight_decay=0.1)
    model = tiny_model(tied=True, dtype=torch.float64)
    policy = PolicyModel(model)
    step, _ = make_step(policy, config)
    samples = batch(model)
    expected = tiny_model(tied=True, dtype=torch.float64)
    gradient = oracle_gradient(model, samples, config)
    for name, parameter in expected.named_parameters():
        parameter.grad = gradient[name]
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), config.optimizer.max_grad_norm)
    decayed = [p for p in expected.parameters() if p.ndim == 2]
    spared = [p for p in expected.parameters() if p.ndim == 1]
    torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}],
        lr=1e-2 / 4,
        betas=(0.9, 0.95),
    ).step()

    for part in (samples[:1], [], samples[1:]):
        step.accumulate(pack(part))
    result = step.finish(4)

    assert result.skipped == ""
    assert result.num_minibatches == 3
    assert result.learning_rate == 1e-2 / 4
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-10)
    assert result.grad_norm > config.optimizer.max_grad_norm
    assert result.metrics["trained_samples"] == 4
    assert result.metrics["trained_tokens"] == sum(s.num_trained_tokens for s in samples)
    for (name, got), want in zip(
        policy.model.named_parameters(), expected.parameters(), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("optim", "off_by"), [("paged_adamw", 1e-5), ("adamw_8bit", 0.1), ("paged_adamw_8bit", 0.1)]
)
def test_bitsandbytes_steps_as_torch_does(optim, off_by):
    """By the norm of what five steps change; with 8 bits every moment is rounded."""
    pytest.importorskip("bitsandbytes")
    moved = {}
    for name in ("adamw", optim):
        policy = PolicyModel(tiny_model(tied=True).float())
        before = [each.detach().clone() for each in policy.parameters()]
        options = OptimizerOptions(optim=name, learning_rate=1e-3, weight_decay=0.1)
        optimizer = make_optimizer(policy, options, MemoryOptions())
        if name.endswith("8bit"):
            optimizer.adamw.args.min_8bit_size = 0
        generator = torch.Generator().manual_seed(3)
        for _ in range(5):
            for each in policy.parameters():
                each.grad = torch.randn(each.shape, generator=generator)
            optimizer.step()
        pairs = zip(policy.parameters(), before, strict=True)
        moved[name] = torch.cat([(now - then).detach().flatten() for now, then in pairs])
    assert (moved[optim] - moved["adamw"]).norm() <= off_by * moved["adamw"].norm()
    assert moved["adamw"].norm() > 0


@pytest.mark.parametrize(("limit", "factor"), [(2.0, 1.0), (0.5, 0.5), (0.0, 1.0)])
def test_a_gradient_is_clipped_to_the_limit_and_never_scaled_up(limit, factor):
    """SGD, whose update is the gradient: of norm 1 after the division by D."""
    policy = PolicyModel(tiny_model(tied=True, dtype=torch.float64))
    step, _ = make_step(policy, make_config(max_grad_norm=limit, num_warmup_steps=0))
    step.optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    step.accumulate(pack(batch(policy.model)))
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])
    for parameter in policy.parameters():
        parameter.grad *= 4 / norm
    wanted = {name: p.grad / 4 * factor for name, p in policy.named_parameters()}
    before = parameters_of(policy)
    assert step.finish(4).grad_norm == pytest.approx(1.0)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(
            before[name] - parameter.detach(), 1e-2 * wanted[name], rtol=2e-6, atol=1e-12
        )


def test_metrics_do_not_depend_on_the_partition():
    model = tiny_model(tied=True, dtype=torch.float64)
    samples = batch(model, count=5)
    results = []
    for parts in ([samples], [samples[3:], [], samples[:1], samples[1:3]]):
        step, _ = make_step(PolicyModel(model), make_config(max_staleness=1, learning_rate=1e-30))
        for part in parts:
            step.accumulate(pack(part))
        results.append(step.finish(5).metrics)
    assert results[0] == pytest.approx(results[1], rel=1e-10)
    assert results[0]["mismatch_max"] > 0.1


def test_the_mismatch_is_measured_whatever_the_algorithm(tmp_path):
    (tmp_path / "mine.py").write_text(REINFORCE)
    model, found = tiny_model(tied=True, dtype=torch.float64), []
    samples = batch(model, count=5)
    for algorithm in ("grpo", f"{tmp_path}/mine.py:Reinforce"):
        config = make_config(max_staleness=1, learning_rate=1e-30, algorithm=algorithm)
        step, _ = make_step(PolicyModel(model), config)
        step.accumulate(pack(samples))
        metrics = step.finish(5).metrics
        found.append({name: metrics[name] for name in ("sampled_tokens", "mismatch_kl_sum")})
    assert found[0] == pytest.approx(found[1], rel=1e-10)
    assert found[0]["mismatch_kl_sum"] > 0


def test_without_samples_nothing_moves():
    policy = PolicyModel(tiny_model(tied=True))
    step, optimizer = make_step(policy, make_config())
    before = parameters_of(policy)
    step.accumulate(collate([], aggregation="sample-mean"))
    result = step.finish(0)
    assert result.skipped == NO_SAMPLES
    assert not optimizer.state
    assert all(torch.equal(before[name], now) for name, now in policy.named_parameters())
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_to_ask_what_was_trained_adds_no_metric():
    policy = PolicyModel(tiny_model(tied=True, dtype=torch.float64))
    asked, other = (make_step(policy, make_config())[0] for _ in range(2))
    assert asked.backpropagated == (0, 0)
    assert asked.finish(0).metrics == other.finish(0).metrics


def test_a_non_finite_gradient_is_skipped_and_leaves_no_trace():
    model = tiny_model(tied=True, dtype=torch.float64)
    policy = PolicyModel(model)
    step, optimizer = make_step(policy, make_config())
    before = parameters_of(policy)
    packed, good = pack(batch(model)), pack(batch(model))
    packed.advantages[0] = math.inf
    step.accumulate(packed)
    step.count(num_fillers=1)
    result = step.finish(4)
    assert result.skipped == NON_FINITE
    assert not math.isfinite(result.grad_norm)
    assert not optimizer.state
    assert all(torch.equal(before[name], now) for name, now in policy.named_parameters())
    step.accumulate(good)
    after = step.finish(4)
    fresh, _ = make_step(PolicyModel(tiny_model(tied=True, dtype=torch.float64)), make_config())
    fresh.accumulate(good)
    assert after == fresh.finish(4)


def spoil(step, *, loss=0.0, gradient=False):
    """From now on losses are off by `loss`, and `gradient` makes the gradient alone infinite."""
    compute = step._algorithm.loss

    def spoilt(*args):
        result = compute(*args)
        zero = (args[0].logprobs - args[0].logprobs.detach()).sum()
        return replace(result, loss=result.loss + loss + (zero.sqrt() if gradient else 0.0))

    step._algorithm.loss = spoilt


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradient_is(value):
    model = tiny_model(tied=True, dtype=torch.float64)
    policy = PolicyModel(model)
    step, optimizer = make_step(policy, make_config())
    before = parameters_of(policy)
    spoil(step, loss=value)
    step.accumulate(pack(batch(model)))
    result = step.finish(4)
    assert result.skipped == NON_FINITE
    assert math.isfinite(result.grad_norm)
    assert not optimizer.state
    assert all(torch.equal(before[name], now) for name, now in policy.named_parameters())


def test_suspects_are_the_minibatches_with_a_bad_loss_else_all():
    model = tiny_model(tied=True, dtype=torch.float64)
    samples = batch(model)
    bad = pack(samples[1:2])
    bad.advantages[0] = math.nan
    step, _ = make_step(PolicyModel(model), make_config())
    for packed in (pack(samples[:1]), bad, pack([])):
        step.accumulate(packed)
    assert step.finish(4).suspects == (1,)

    for part in (samples[:1], samples[1:]):
        step.accumulate(pack(part))
    assert step.finish(4).suspects == ()

    spoil(step, gradient=True)
    for part in (samples[:1], samples[1:]):
        step.accumulate(pack(part))
    result = step.finish(4)
    assert (result.skipped, result.suspects) == (NON_FINITE, (0, 1))
    assert math.isfinite(result.metrics["loss_sum"])


def test_skipped_steps_move_no_clock():
    model = tiny_model(tied=True, dtype=torch.float64)
    step, _ = make_step(
        PolicyModel(model),
        make_config(schedule_clock="samples", num_warmup_steps=0, num_warmup_samples=40),
    )
    good, bad = pack(batch(model)), pack(batch(model))
    bad.advantages[0] = math.nan
    results = []
    for packed, denominator in ((good, 4), (bad, 4), (pack([]), 0), (good, 4)):
        step.accumulate(packed)
        results.append(step.finish(denominator))
    assert [result.skipped for result in results] == ["", NON_FINITE, NO_SAMPLES, ""]
    taken = Clocks(steps=1, samples=4)
    assert [result.clocks for result in results] == [taken, taken, taken, Clocks(2, 8)]
    assert [results[0].learning_rate, results[3].learning_rate] == [1e-2 * 0.1, 1e-2 * 0.2]
    assert step.clocks == Clocks(2, 8)


def test_the_clock_of_samples_does_not_count_tokens():
    model = tiny_model(tied=True, dtype=torch.float64)
    step, _ = make_step(PolicyModel(model), make_config(aggregation="token-mean"))
    step.accumulate(pack(batch(model)))
    assert step.finish(29, num_samples=4).clocks == Clocks(steps=1, samples=4)


class Bigrams(torch.nn.Module):
    """A policy without attention, whose CPU kind reads the lengths of sequences."""

    routing = None

    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.randn(64, 8, dtype=torch.float64))

    def forward(self, packed, *, temperature, chunk_size, terms=()):
        hidden = self.rows[packed.input_ids][packed.logit_positions]
        setting = {"temperature": temperature, "chunk_size": chunk_size}
        return token_logprobs(hidden, Head(self.rows), packed.target_ids, **setting)


def test_no_number_is_read_before_the_step_ends():
    step, _ = make_step(Bigrams(), make_config(loss_chunksize=4))
    packed = pack(batch(tiny_model(tied=True, dtype=torch.float64)))
    with NumbersRead() as numbers:
        step.accumulate(packed)
        step.count(num_fillers=1)
    assert numbers.count == 0
    with NumbersRead() as numbers:
        step.finish(4)
    assert numbers.count > 0


@pytest.mark.parametrize("with_filler", [True, False])
def test_a_zero_gradient_with_samples_is_a_step(with_filler):
    model = tiny_model(tied=True, dtype=torch.float64)
    policy = PolicyModel(model)
    step, optimizer = make_step(policy, make_config())
    step.accumulate(pack(batch(model)))
    step.finish(4)
    moments = {p: state["exp_avg"].clone() for p, state in optimizer.state.items()}
    before = parameters_of(policy)
    if with_filler:
        step.accumulate(pack([]))
    result = step.finish(4)
    assert (result.skipped, result.grad_norm) == ("", 0.0)
    assert any(not torch.equal(before[name], now) for name, now in policy.named_parameters())
    for parameter, state in optimizer.state.items():
        torch.testing.assert_close(state["exp_avg"], 0.9 * moments[parameter])


def test_discarding_forgets_gradients_and_metrics():
    model = tiny_model(tied=True, dtype=torch.float64)
    step, _ = make_step(PolicyModel(model), make_config())
    step.accumulate(pack(batch(model, seed=1)))
    step.discard()
    step.accumulate(pack(batch(model, seed=2)))
    fresh, _ = make_step(PolicyModel(tiny_model(tied=True, dtype=torch.float64)), make_config())
    fresh.accumulate(pack(batch(model, seed=2)))
    assert step.finish(4) == fresh.finish(4)


def test_a_supervised_run_learns_its_pairs():
    model = tiny_model(tied=True)
    config = make_config(algorithm="sft", aggregation="token-mean", max_grad_norm=0.0)
    step, _ = make_step(PolicyModel(model), config)
    samples = batch(tiny_model(tied=True, dtype=torch.float64))
    num_tokens = sum(sample.num_trained_tokens for sample in samples)
    losses = []
    for _ in range(30):
        step.accumulate(collate(samples, aggregation="token-mean"))
        losses.append(step.finish(num_tokens).metrics["loss_sum"] / num_tokens)
    assert losses[-1] < 0.3 * losses[0]
