"""The whole loop as users start it: two engines, a logprob worker of two ranks, two trainers."""

import hashlib
import json
import signal
from collections import Counter

import numpy as np
import pytest
import torch
from commands import wait_until
from effort import updates
from loops import (
    READY_S,
    TIMEOUT_S,
    Setup,
    check_rows,
    controller_call,
    engine_differences,
    on_a_worker,
    read_lines,
    read_samples,
    recomputed,
    recomputed_samples,
    wait_until_registered,
)
from oracle import make_sample, oracle_gradient
from rollouts_pages import NEEDS_NODE, Page, recomputed_weights, write
from tiny_models import load_model

from async_grpo.config.roles import GENERATION, REFERENCE
from async_grpo.config.train_config import TrainConfig
from async_grpo.types import GenerationRequest, LogprobRequest, SamplingContract, WeightsVersion

pytestmark = pytest.mark.integration

TOLERANCE = 5e-6
NAMESPACE = "loop"
BATCHES, BATCH, MINIBATCH, GROUP = 3, 6, 3, 4
UPDATES, PERIOD = updates(6), 2
AHEAD = {
    "num_training_batches": UPDATES + 2,
    "max_staleness": 1,
    "train_minibatch_size": 2,
    "ratio_mode": "decoupled",
    "importance_correction": "truncate",
    "kl_coefficient": 0.05,
    "num_batches_per_ref_model_update": PERIOD,
    "learning_rate": 2e-3,
    "min_samples_per_checkpoint": 1,  # an export of every version
    "max_tokens_per_gpu": 512,
}
PROMPT = np.array([3, 13, 4, 19], dtype=np.int32)


@pytest.fixture(scope="module")
def setup(ray_cluster, tiny_model, questions, tmp_path_factory):
    setup = Setup(tmp_path_factory.mktemp("loop"), ray_cluster, tiny_model, questions,
                  namespace=NAMESPACE, reward="share_of_digits")  # fmt: skip
    logprob = setup.workers("logprob", "--scorer-ranks", 2, num_workers=1)
    with setup.workers("generation") as generation, logprob:
        wait_until_registered(generation, 2)
        wait_until_registered(logprob, 1)
        yield setup


@pytest.fixture(scope="module")
def trained(setup, questions):
    """The folder of a run with a KL penalty and two gradient steps a batch."""
    command = setup.train(
        "trained",
        num_training_batches=BATCHES,
        max_staleness=0,
        batch_size=BATCH,
        train_minibatch_size=MINIBATCH,
        kl_coefficient=0.05,
        learning_rate=2e-3,
        eval_data_path=questions,
    )
    with command:
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    return setup.folder / "trained"


def test_every_step_accounts_for_every_sample(setup, trained):
    rows = setup.rows("trained")
    assert [row["iteration"] for row in rows] == [0, 0, 1, 1, 2, 2]
    for number, row in enumerate(rows):
        fates = {name: count for name, count in row.items() if name.startswith("fate_")}
        assert sum(fates.values()) == MINIBATCH * GROUP
        assert row["fate_trained"] == row["trained_samples"] == row["num_samples"] == 12
        assert row["optimizer_steps"] == number + 1
        assert row["total_samples_accumulated"] == 12 * (number + 1)
        assert row["num_minibatches"] % 2 == 0
        assert 0 < row["packing_efficiency"] <= 1
        assert row["max_lag"] == 0
        assert row["grad_norm"] > 0


def test_dumped_samples_are_those_of_the_steps(setup, trained):
    samples = read_samples(trained)
    keys = {(sample["ordinal"], sample["index"]) for sample in samples}
    assert keys == {(o, i) for o in range(BATCHES * BATCH) for i in range(GROUP)}
    assert len(samples) == len(keys)
    for number, row in enumerate(setup.rows("trained")):
        own = [s for s in samples if s["ordinal"] // MINIBATCH == number]
        assert row["avg_reward"] == pytest.approx(np.mean([s["reward"] for s in own]))
        assert row["trained_tokens"] == sum(sum(s["loss_mask"]) for s in own)
        versions = {WeightsVersion.parse(v) for s in own for v, _, _ in s["weights_versions"]}
        assert {version.batches for version in versions} == {row["iteration"]}
    for sample in samples:
        output = sample["output"]
        assert sample["reward"] == sum(map(str.isdigit, output)) / max(len(output), 1)


def test_questions_are_drawn_evenly(trained):
    drawn = Counter(s["input"] for s in read_samples(trained))
    assert set(drawn.values()) == {2 * GROUP, 3 * GROUP}  # 18 questions out of 8


def test_engine_and_trainer_agree_after_every_publication(setup, trained):
    rows = setup.rows("trained")
    on_policy, moved = rows[::2], rows[1::2]
    assert max(row["mismatch_max"] for row in on_policy) <= TOLERANCE
    assert min(row["mismatch_max"] for row in moved) > 100 * TOLERANCE


def test_the_reference_starts_as_the_policy_and_stays(setup, trained):
    kl = [row["kl"] for row in setup.rows("trained")]
    assert 0 <= kl[0] < 1e-9
    assert kl[0] < kl[2] < kl[4]
    assert kl[4] > 1e-6


def test_the_first_gradient_is_that_of_the_dumped_samples(setup, trained):
    lines = read_samples(trained)
    samples = [
        make_sample(
            line["input_token_ids"],
            line["output_token_ids"],
            mask=line["loss_mask"],
            behaviour=line["behaviour_logprobs"],
            reference=line["reference_logprobs"],
            advantage=line["advantage"],
        )
        for line in lines
        if line["ordinal"] < MINIBATCH
    ]
    config = TrainConfig(
        model_name_or_path="m", data_path="d", ratio_mode="behaviour", kl_coefficient=0.05
    )
    gradient = oracle_gradient(load_model(setup.model), samples, config)
    norm = torch.stack([value.norm() for value in gradient.values()]).norm().item()
    assert setup.rows("trained")[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


@NEEDS_NODE
def test_a_page_of_the_run_has_the_trainers_own_gradient_of_every_token(trained):
    page = Page(write(trained))
    assert [step["num_samples"] for step in page.header["steps"]] == [12] * 2 * BATCHES
    of_training = [n for n, name in enumerate(page.labels("set")) if name == "training"]
    rank, step, ordinal, num_tokens = (
        [page.columns[name][n] for n in of_training]
        for name in ("rank", "step", "ordinal", "num_trained_tokens")
    )
    assert set(rank) == {0, 1}
    assert step == [1 + n // MINIBATCH for n in ordinal]
    assert all(told["workers"][0] for told in page.details)
    found, trainers = recomputed_weights(page)
    assert len(found) == sum(num_tokens)
    assert found == pytest.approx(trainers, rel=1e-4, abs=1e-6)


def test_held_out_questions_are_graded_before_and_after(trained):
    first, last = read_lines(trained / "evaluation_metrics.jsonl")
    assert (first["step"], last["step"]) == (0, 6)
    for row in (first, last):
        assert (row["num_questions"], row["num_samples"], row["num_failed"]) == (8, 32, 0)
        assert 0 <= row["eval_reward"] <= 1


def test_held_out_answers_are_dumped_and_are_those_that_were_graded(trained):
    dumped = read_lines(trained / "samples.held_out.jsonl")
    assert {line["batch"] for line in dumped} == {0, BATCHES}
    for row in read_lines(trained / "evaluation_metrics.jsonl"):
        own = [line for line in dumped if line["batch"] * 2 == row["step"]]
        keys = {(line["question"], line["index"]) for line in own}
        assert len(own) == len(keys) == row["num_samples"]
        assert row["eval_reward"] == pytest.approx(np.mean([line["reward"] for line in own]))
    page = Page(write(trained))
    assert Counter(page.labels("set")) == {"training": BATCHES * BATCH * GROUP, "held-out": 64}


def test_workers_serve_what_was_exported(setup, trained, driver):
    """The engines the last weights, the reference the first, to the precision of float32."""
    (export,) = (trained / "hf_format").iterdir()
    assert export.name == f"samples_{BATCHES * BATCH * GROUP}"
    ((text, _, _),) = read_samples(trained)[0]["weights_versions"]
    incarnation = WeightsVersion.parse(text).incarnation
    sampling = SamplingContract(1.0, (1,), 24)
    request = GenerationRequest(0, 0, PROMPT, 8, sampling)
    last, first = (WeightsVersion(incarnation, batches) for batches in (BATCHES, 0))
    before, after = load_model(setup.model), load_model(export)
    for completion in on_a_worker(GENERATION, "generate", request):
        assert {span.version for span in completion.weights_versions} == {last}
        ids, said = completion.token_ids, completion.logprobs
        assert np.abs(recomputed(after, PROMPT, ids) - said).max() <= TOLERANCE
        assert np.abs(recomputed(before, PROMPT, ids) - said).max() > 1e-3
    scored = LogprobRequest((PROMPT,), (ids,), 1.0, first)
    (scores,) = on_a_worker(REFERENCE, "logprobs", scored)
    assert np.abs(recomputed(before, PROMPT, ids) - scores).max() <= TOLERANCE


@pytest.mark.slow
def test_an_exported_model_joins_a_run_as_a_worker(setup, trained, driver):
    """vLLM loads the export; the newcomer gets the run's weights, then all of its questions."""
    (export,) = (trained / "hf_format").iterdir()
    veterans = [worker.worker_id for worker in controller_call("members", GENERATION)]
    options = {"num_training_batches": 100_000, "max_staleness": 0, "learning_rate": 1e-5}
    with setup.train("endless", **options) as endless:
        wait_until(lambda: setup.rows("endless"), timeout_s=READY_S)
        with setup.workers("generation", num_workers=1, model=export) as newcomer:
            wait_until_registered(newcomer, 1)
            assert len(controller_call("members", GENERATION)) == 3
            for veteran in veterans:
                controller_call("drain", GENERATION, veteran)
            num_rows = len(setup.rows("endless"))
            wait_until(lambda: len(setup.rows("endless")) >= num_rows + 5, timeout_s=TIMEOUT_S)
            endless.send(signal.SIGINT)
            assert endless.wait(timeout_s=TIMEOUT_S) != 0
            newcomer.send(signal.SIGINT)
            newcomer.wait(timeout_s=TIMEOUT_S)
            for veteran in veterans:
                controller_call("drain", GENERATION, veteran, False)
    rows = setup.rows("endless")
    assert max(row["mismatch_max"] or 0.0 for row in rows) <= TOLERANCE
    assert all(row["fate_failed"] == 0 for row in rows)
    assert len(controller_call("members", GENERATION)) == 2


@pytest.fixture(scope="module")
def ahead(setup, trained, long_questions):
    """What a run one batch ahead printed; its workers were left by an earlier one.

    Of one rank: two have trained before, and lag behind in test_scripted_loop.py.
    """
    with setup.train("ahead", ranks=1, data_path=long_questions, **AHEAD) as command:
        assert command.wait(timeout_s=READY_S + UPDATES) == 0, command.err[-4000:]
        return command.out


def test_a_run_says_which_rewards_it_was_trained_with(setup, ahead):
    [part] = json.loads((setup.folder / "ahead" / "training_params.json").read_text())["parts"]
    own = setup.folder / "rewards.py"
    assert part["code"] == {f"reward {own}": hashlib.sha256(own.read_bytes()).hexdigest()}


def test_a_run_ahead_says_in_words_what_it_optimises(ahead):
    for words in (
        "ratio: a token, against the policy at the start of the batch; clipped to [0.8, 1.2]",
        "engine/trainer correction: truncate(trainer/engine, 2) a token",
        "penalties: 0.05 * KL (k3) in the loss",
    ):
        assert ahead.count(words) == 1


def test_a_run_ahead_accounts_for_every_sample_and_is_never_too_old(setup, ahead):
    rows = setup.rows("ahead")
    check_rows(rows, questions=2, group=GROUP, max_staleness=1)
    assert [row["iteration"] for row in rows] == [n // 2 for n in range(2 * (UPDATES + 2))]
    assert {row["max_lag"] for row in rows[2:]} == {1}
    assert rows[0]["mismatch_max"] <= TOLERANCE < rows[4]["mismatch_max"]
    assert rows[4]["effective_sample_size"] < 1
    keys = [(sample["ordinal"], sample["index"]) for sample in setup.samples("ahead")]
    assert sorted(keys) == [(o, i) for o in range(4 * (UPDATES + 2)) for i in range(GROUP)]


def test_engine_and_trainer_agree_after_every_update_of_a_run_ahead(setup, ahead):
    """By the canary of the rows, and by all tokens against the weights that they name.

    Prefix caching is on, and the prompts are long enough for it.
    """
    rows = setup.rows("ahead")
    assert max(row["canary_max"] for row in rows) <= TOLERANCE
    assert len({row["sync_batches"] for row in rows}) > UPDATES / 2
    differences = engine_differences(setup.samples("ahead"), setup.versions("ahead"))
    assert set(differences) >= set(range(UPDATES + 1))
    assert max(map(max, differences.values())) <= TOLERANCE


def test_a_moving_reference_scores_each_batch_with_the_version_that_it_names(setup, ahead):
    models, due = setup.versions("ahead"), {}
    for sample in setup.samples("ahead"):
        batches = PERIOD * (max(0, sample["batch"] - AHEAD["max_staleness"]) // PERIOD)
        due.setdefault(batches, []).append(sample)
    for batches, samples in due.items():
        other = batches + PERIOD if batches + PERIOD < len(models) else batches - PERIOD
        own, wrong = (recomputed_samples(models[number], samples) for number in (batches, other))
        apart = []
        for sample, right, no_match in zip(samples, own, wrong, strict=True):
            scores = np.array(sample["reference_logprobs"])
            assert np.abs(right - scores).max() <= TOLERANCE
            apart.append(np.abs(no_match - scores).max())
        # One of a single token that is nearly certain tells versions apart, by less.
        assert min(apart) > TOLERANCE and np.median(apart) > 100 * TOLERANCE
