"""Distillation as the learner runs it: steps, metrics, fillers, shards and what contributes."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from distilled import divergences, make_samples, make_teachers, objective
from oracle import make_config, oracle_logprobs, oracle_twin, relative_difference, tiny_model
from ranks import run_ranks
from tensor_watchers import LargestTensor
from torch.distributed.device_mesh import init_device_mesh
from trained import OPTIONS, assert_same_parameters, make_learner, make_oracle, train

from async_grpo.algorithms import distillation
from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.distillation_loss import NAME
from async_grpo.algorithms.find import find_algorithm
from async_grpo.model.collate import collate
from async_grpo.model.logprobs import TokenLogprobs
from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.telemetry.metrics_row import metrics_row
from async_grpo.training.fsdp import shard
from async_grpo.types import Group

EVERYTHING = OPTIONS | {
    "teacher_for": "+=plus,times", "reward_coefficient": 0.5, "opd_coefficient": 0.3,
    "opd_clip": 1.5, "gkd_coefficient": 0.8, "gkd_alpha": 0.3, "gkd_temperature": 2.0,
    "gkd_square_temperature": True, "gkd_top_k": 8, "kl_coefficient": 0.1,
}  # fmt: skip
WIDTHS = (64, 61)


def of_trained(values, samples):
    """The values [L] of each sample at its trained tokens, laid end to end."""
    masks = [np.concatenate([row.loss_mask for row in s.episode.rows]) for s in samples]
    return np.concatenate([own[mask] for own, mask in zip(values, masks, strict=True)])


@pytest.mark.parametrize("kind", ["topk", "hidden", "logits"])
def test_it_trains_and_measures_as_the_oracle_does(kind):
    config = make_config(**EVERYTHING, teacher_payload=kind)
    rng = np.random.default_rng(1)
    teachers = make_teachers(rng, WIDTHS)
    learner = make_learner(config)
    learner.step.head_terms = learner.algorithm.teacher_terms(
        [t.on_rank(config, torch.float64) for t in teachers]
    )
    model, optimizer = make_oracle()
    for batch in range(3):
        samples, numbers, states = make_samples(
            rng, config, teachers, count=6, model=model, max_rows=1, share_given=0.4
        )
        of_all = [
            divergences(model, sample, config, teachers[number], hidden).detach().numpy()
            for sample, number, hidden in zip(samples, numbers, states, strict=True)
        ]
        sampled = [sample for sample in samples if not sample.episode.is_given]
        gaps = [
            s.scores["teacher"] - oracle_logprobs(model, s, temperature=1.0).detach().numpy()
            for s in sampled
        ]
        optimizer.zero_grad()
        objective(model, samples, config, teachers, numbers, states).backward()
        result = train(learner, samples, batch=batch)
        optimizer.step()
        assert_same_parameters(learner, model)
        counts = {name: {} for name in ("fates", "reasons", "tokens")}
        row = metrics_row(result.metrics, declared=learner.algorithm.metrics, **counts)
        assert row["teacher_gap"] == pytest.approx(of_trained(gaps, sampled).mean(), rel=1e-5)
        mean = of_trained(of_all, samples).mean()
        assert row["gkd_divergence"] == pytest.approx(mean, rel=1e-5)
        if kind == "topk":
            tails = [np.exp(sample.scores["teacher.tail"]) for sample in samples]
            assert row["teacher_tail"] == pytest.approx(of_trained(tails, samples).mean(), rel=1e-5)
        else:
            assert "teacher_tail" not in row


@pytest.mark.parametrize("kind", ["topk", "hidden", "logits"])
def test_a_filler_s_gradient_is_exactly_zero(kind):
    config = make_config(**EVERYTHING, teacher_payload=kind)
    policy = PolicyModel(tiny_model(tied=True))
    algorithm = find_algorithm(config)
    teachers = make_teachers(np.random.default_rng(0), WIDTHS)
    terms = algorithm.teacher_terms(
        [teacher.on_rank(config, torch.float32) for teacher in teachers]
    )
    filler = collate([], aggregation="sample-mean", scores=algorithm.score_columns)
    scored = policy(filler, temperature=1.0, chunk_size=4, terms=terms)
    algorithm.loss(scored, filler).loss.backward()
    for _, parameter in hf_named_parameters(policy):
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def gradient_of_ranks(rank, *, kind):
    """The summed gradient of this rank's samples and an empty minibatch, sharded over two."""
    config, teachers, samples, *_ = scene(kind)
    algorithm = find_algorithm(config)
    terms = algorithm.teacher_terms(
        [teacher.on_rank(config, torch.float64) for teacher in teachers]
    )
    policy = PolicyModel(tiny_model(tied=True, dtype=torch.float64))
    shard(policy, init_device_mesh("cpu", (2,)))
    for part in (samples[:3], []) if rank else ([], samples[3:]):
        packed = collate(
            part,
            aggregation=config.objective.aggregation,
            scores=algorithm.score_columns,
            scores_of_given=algorithm.scores_of_given,
            dtype=torch.float64,
        )
        scored = policy(packed, temperature=1.0, chunk_size=3, terms=terms)
        algorithm.loss(scored, packed).loss.backward()
    return {n: p.grad.full_tensor() for n, p in hf_named_parameters(policy)}


def scene(kind):
    config = make_config(**EVERYTHING, teacher_payload=kind)
    rng = np.random.default_rng(2)
    teachers = make_teachers(rng, WIDTHS)
    model = oracle_twin(tiny_model(tied=True, dtype=torch.float64))
    found = make_samples(rng, config, teachers, count=5, model=model, max_rows=1, share_given=0.4)
    return config, teachers, *found


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["topk", "hidden"])
def test_the_gradient_is_the_oracle_s_through_shards_and_fillers(kind, tmp_path):
    found = run_ranks(gradient_of_ranks, num_ranks=2, folder=tmp_path, kind=kind)
    config, teachers, samples, numbers, states = scene(kind)
    model = oracle_twin(tiny_model(tied=True, dtype=torch.float64))
    objective(model, samples, config, teachers, numbers, states).backward()
    expected = {name: p.grad * len(samples) for name, p in model.named_parameters()}
    for gradient in found:
        assert relative_difference(gradient, expected) < 1e-12


def test_a_group_of_equal_rewards_is_trained_where_a_teacher_has_something_to_say():
    _, _, samples, *_ = scene("topk")
    group = tuple(
        replace(s, verdict=replace(s.verdict, reward=1.0)) for s in samples if s.episode.turns
    )
    assert len(group) > 1
    taught = OPTIONS | {"teacher_for": "math", "opd_coefficient": 0.3}
    for options, contributes in ((taught, True), (OPTIONS, False)):
        rules = LocalRules(find_algorithm(make_config(**options)))
        finished = asyncio.run(rules.finish_group(Group(0, 0, group)))
        assert {s.contributes for s in finished.samples} == {contributes}
        assert not any(sample.has_advantage for sample in finished.samples)


@pytest.mark.parametrize("kind", ["hidden", "logits"])
def test_given_tokens_beside_sampled_ones_cost_no_copy_of_what_teachers_say(kind):
    config, _, samples, *_ = scene(kind)
    algorithm = find_algorithm(config)
    packed = collate(
        samples,
        aggregation=config.objective.aggregation,
        scores=algorithm.score_columns,
        scores_of_given=algorithm.scores_of_given,
    )
    assert 0 < packed.is_given.sum() < len(packed.is_given)
    nothing = torch.zeros(len(packed.target_ids))
    with LargestTensor() as largest:
        algorithm.loss(TokenLogprobs(nothing, nothing, {NAME: nothing}), packed)
    assert largest.num_elements == len(nothing)


def test_a_sample_without_what_its_teacher_says_is_refused_by_name():
    config, teachers, samples, *_ = scene("topk")
    learner = make_learner(config)
    learner.step.head_terms = learner.algorithm.teacher_terms(
        [t.on_rank(config, torch.float64) for t in teachers]
    )
    scores = {n: v for n, v in samples[0].scores.items() if n != "teacher.ids"}
    with pytest.raises(ValueError, match=r"lacks teacher\.ids"):
        train(learner, [replace(samples[0], scores=scores)], batch=0)


@pytest.mark.parametrize("kind", ["topk", "hidden", "logits"])
def test_a_copy_of_it_in_a_user_s_file_trains_to_the_same_bits(kind, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(Path(distillation.__file__).read_text())
    trained = []
    for name in ("grpo", f"{own}:Distillation"):
        config = make_config(**EVERYTHING, teacher_payload=kind, algorithm=name)
        rng = np.random.default_rng(2)
        teachers = make_teachers(rng, WIDTHS)
        learner = make_learner(config)
        assert learner.algorithm.teacher_need.fetches_heads == (kind == "hidden")
        learner.step.head_terms = learner.algorithm.teacher_terms(
            [t.on_rank(config, torch.float64) for t in teachers]
        )
        model, _ = make_oracle()
        samples, *_ = make_samples(
            rng, config, teachers, count=4, model=model, max_rows=1, share_given=0.4
        )
        metrics = train(learner, samples, batch=0).metrics
        trained.append((learner, [*learner.policy.parameters()], metrics["loss_sum"]))
    (shipped, parameters, loss), (copied, *others) = trained
    assert type(copied.algorithm) is not type(shipped.algorithm)
    assert all(map(torch.equal, parameters, others[0])) and loss == others[1]
