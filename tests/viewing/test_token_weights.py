"""What the page computes of a token's weight is what the trainer did with it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from learners import make_learner, make_minibatches
from oracle import loss_with, make_config, oracle_twin, random_samples, sent, tiny_model
from rollouts_pages import NEEDS_NODE, Page, recomputed, recomputed_weights, write
from scripted import Handle, run

from async_grpo.batching.sample_log import SampleLog
from async_grpo.model.collate import collate
from async_grpo.run.companions import RunRecorder
from async_grpo.telemetry.jsonl import write_json_atomic
from async_grpo.types import EndOfStep, Group, Minibatch
from async_grpo.viewing.page import build

OBJECTIVES = [
    {"ratio_mode": "on_policy"},
    {"ratio_mode": "behaviour", "clip_low": 0.1, "clip_high": 0.2},
    {"ratio_mode": "behaviour", "clip_low": 0.1, "dual_clip": 1.1},
    {"ratio_mode": "behaviour", "policy_loss": "cispo", "clip_low": 0.1, "clip_high": 0.1},
    {"ratio_mode": "behaviour", "ratio_level": "sequence", "clip_high": 0.05, "clip_low": 0.05},
    {"ratio_mode": "decoupled", "importance_correction": "truncate", "correction_high": 1.1},
    {"ratio_mode": "decoupled", "importance_correction": "mask", "correction_low": 0.8,
     "correction_high": 1.2, "correction_level": "sequence"},
    {"aggregation": "token-mean"},
    {"aggregation": "constant", "constant_length_samples": 12},
    *({"ratio_mode": "behaviour", "kl_coefficient": 0.3, "kl_estimator": name}
      for name in ("k2", "k3", "k3_iw")),
]  # fmt: skip


def options_of(config):
    return {name: config.options()[name] for name in build.OPTIONS} | {"mode": config.mode}


@NEEDS_NODE
@pytest.mark.parametrize("options", OBJECTIVES, ids=str)
def test_the_page_has_the_gradient_of_every_objective(options):
    config = make_config(**options)
    rng = np.random.default_rng(3)
    model = oracle_twin(tiny_model(tied=True))
    samples = random_samples(rng, 6, model=model)
    packed = collate(
        samples,
        aggregation=config.objective.aggregation,
        constant_length=config.objective.constant_length_samples,
        dtype=torch.float64,
    )
    behaviour = packed.behaviour_logprobs.double()
    lp = (behaviour + torch.from_numpy(rng.normal(0, 0.3, len(behaviour)))).requires_grad_()
    old = lp.detach() + torch.from_numpy(rng.normal(0, 0.2, len(behaviour)))
    own = torch.from_numpy(
        rng.normal(size=len(behaviour))
    )  # a token's, as an algorithm may have it
    packed = replace(packed, advantages=own, scores={**packed.scores, "old": old})
    loss_with(config, lp, torch.zeros_like(old), packed).loss.backward()
    rows = [
        {
            "w": packed.weights[index][0].item(),
            "advantages": packed.advantages[index].tolist(),
            "logprobs": lp.detach()[index].tolist(),
            "old": old[index].tolist(),
            "behaviour": behaviour[index].tolist(),
            "reference": packed.scores["reference"][index].tolist(),
        }
        for index in (packed.sample_index == number for number in range(len(samples)))
        if index.any()
    ]
    found = [token["gradient"] for row in recomputed(options_of(config), rows) for token in row]
    assert found == pytest.approx(lp.grad.tolist(), rel=1e-6, abs=1e-12)
    assert len(set(found)) > 3


class Numbers:
    decode = staticmethod(lambda ids: " ".join(map(str, ids)))


def with_places(episode):
    """A turn in each row, which is all of it."""
    return replace(episode, places=tuple((number, 0) for number in range(len(episode.rows))))


def trained_run(folder, *, again=False, **options):
    """A gradient step of a learner, with its dump; samples of one row and of two."""
    folder.mkdir(exist_ok=again)
    options = {"dump_token_columns": True, "batch_size": 6, "train_minibatch_size": 3} | options
    learner = make_learner(folder, **options)
    model = oracle_twin(tiny_model(tied=True))
    samples = random_samples(np.random.default_rng(5), 3, model=model, max_rows=2)
    samples = tuple(
        replace(sample, ordinal=3 + n, episode=with_places(sample.episode))
        for n, sample in enumerate(samples)
    )
    parts = [tuple(part for sample in own for part in sample.parts()) for own in
             (samples[:2], samples[2:])]  # fmt: skip
    rounds = [Minibatch(number, own) for number, own in enumerate([*parts, ()])]
    write_json_atomic(folder / "training_params.json", learner.config.options())
    for minibatch in rounds:
        learner.accumulate(minibatch)
    end = EndOfStep(0, 1, True, num_samples=4, num_tokens=50, sent=sent(samples))

    async def dump():
        recorder = RunRecorder(str(folder / "samples.jsonl"))
        log = SampleLog(Handle(recorder), has_tokens=True)
        for sample in samples:
            log.write(Group(sample.ordinal, 0, (sample,)), batch=0, fates=("trained",))
        for minibatch in rounds:
            log.sent([Minibatch(0, ())] * 3 + [minibatch])
        config = learner.config
        await log.end_step(end, config.batching, ratio_mode=config.mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("async_grpo.run.companions.find_tokenizer", lambda model: Numbers)
        run(dump())
    learner.update(end)
    return samples


@NEEDS_NODE
@pytest.mark.parametrize("mode", ["behaviour", "decoupled"])
def test_weights_recomputed_from_a_page_are_those_of_the_trainer(mode, tmp_path):
    samples = trained_run(tmp_path / "run", ratio_mode=mode, clip_low=0.1, clip_high=0.1)
    shown = Page(write(tmp_path / "run"))
    assert shown.columns["num_trained_tokens"] == [s.num_trained_tokens for s in samples]
    assert shown.columns["rank"] == [3, 3, 3]
    assert shown.columns["round"] == [0, 0, 1]
    assert shown.columns["step"] == [2, 2, 2]
    [step] = shown.header["steps"]
    assert (step["num_samples"], step["num_tokens"], step["ratio_mode"]) == (4, 50, mode)
    found, trainers = recomputed_weights(shown)
    assert len(found) >= 20
    assert len({round(each, 6) for each in found}) > 10
    assert found == pytest.approx(trainers, rel=1e-4, abs=1e-7)


def test_a_run_that_goes_on_writes_the_tokens_of_a_step_once(tmp_path):
    trained_run(tmp_path / "run")
    [path] = (tmp_path / "run").glob("*.rank_*")
    first, steps = path.read_text(), (tmp_path / "run" / "samples.steps.jsonl").read_text()
    (tmp_path / "run").rename(tmp_path / "before")
    (tmp_path / "run").mkdir()
    for name in (path.name, "samples.steps.jsonl"):
        (tmp_path / "before" / name).rename(tmp_path / "run" / name)
    trained_run(tmp_path / "run", again=True)
    assert path.read_text() == first
    assert (tmp_path / "run" / "samples.steps.jsonl").read_text() == steps


def test_what_is_dumped_of_tokens_leaves_the_step_as_it_was(tmp_path):
    weights = [
        trained_weights(tmp_path / str(dumps), dump_token_columns=dumps) for dumps in (False, True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert not list((tmp_path / "False").glob("*.rank_*"))


def trained_weights(folder, **options):
    learner = make_learner(folder, **options)
    [minibatch, *_] = make_minibatches()
    learner.accumulate(minibatch)
    learner.update(EndOfStep(0, 0, False, 2, 9, sent=sent(minibatch.samples)))
    return [parameter.detach() for parameter in learner.policy.parameters()]
