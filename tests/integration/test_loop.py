"""The whole loop as users start it: two vLLM workers, two logprob workers, two trainer ranks."""

import json
import signal
from collections import Counter

import numpy as np
import pytest
import ray
import torch
from commands import dispatcher, trainer, wait_until
from oracle import make_sample, oracle_gradient
from tiny_models import load_model

from async_grpo import cluster
from async_grpo.types import (
    GenerationRequest,
    LogprobRequest,
    SamplingContract,
    WeightsSnapshot,
    WeightsVersion,
)

pytestmark = pytest.mark.integration

TOLERANCE = 5e-6
READY_S, TIMEOUT_S = 180.0, 60.0
NAMESPACE = ("--namespace", "loop")
BATCHES, BATCH, MINIBATCH, GROUP = 3, 6, 3, 4
PROMPT = np.array([3, 13, 4, 19], dtype=np.int32)
REWARD = """
def share_of_digits(sample, **kwargs):
    output = sample["output"]
    return {"reward": sum(map(str.isdigit, output)) / max(len(output), 1)}
"""


class Setup:
    """What all runs of this file share, and a folder for what they leave behind."""

    def __init__(self, folder, address, model, questions):
        self.folder, self.address, self.model, self.questions = folder, address, model, questions
        (folder / "rewards.py").write_text(REWARD)

    def workers(self, mode, *, num_workers=2, model=None):
        """A dispatcher in the foreground."""
        rewards = f"{self.folder / 'rewards.py'}:share_of_digits"
        return dispatcher(
            self.address, model or self.model, "--mode", mode, "--num-workers", num_workers,
            "--reward-fns", rewards, "--max-num-seqs", 16, "--max-tokens-per-gpu", 512, *NAMESPACE,
        )  # fmt: skip

    def train(self, name, **options):
        """Two ranks, whose run goes on."""
        options = {"max_generation_tokens": 12, "max_tokens_per_gpu": 64} | options
        flags = (
            part
            for option, value in options.items()
            for part in ("--" + option.replace("_", "-"), value)
        )
        output = self.folder / name
        return trainer(
            self.address, self.model, self.questions, output, *flags, *NAMESPACE, ranks=2
        )

    def rows(self, name):
        """The lines of a run's metrics so far."""
        return read_lines(self.folder / name / "training_metrics.jsonl")


def read_lines(path):
    """The whole lines of a file that may still be written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def wait_until_registered(command, num_workers):
    wait_until(lambda: command.out.count(" registered") == num_workers, timeout_s=READY_S)


@pytest.fixture(scope="module")
def setup(ray_cluster, tiny_model, questions, tmp_path_factory):
    """Two workers of each role."""
    setup = Setup(tmp_path_factory.mktemp("loop"), ray_cluster, tiny_model, questions)
    with setup.workers("generation") as generation, setup.workers("logprob") as logprob:
        wait_until_registered(generation, 2)
        wait_until_registered(logprob, 2)
        yield setup


@pytest.fixture(scope="module")
def trained(setup, questions):
    """The folder of a run with a KL penalty and two gradient steps a batch."""
    command = setup.train(
        "trained",
        num_training_batches=BATCHES,
        batch_size=BATCH,
        train_minibatch_size=MINIBATCH,
        kl_coefficient=0.05,
        learning_rate=2e-3,
        eval_data_path=questions,
    )
    with command:
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    return setup.folder / "trained"


@pytest.fixture
def driver(setup):
    """This process as a driver of the cluster."""
    cluster.connect(setup.address, namespace=NAMESPACE[1])
    yield
    ray.shutdown()


def registry_call(role, method, *args):
    registry = cluster.find_actor(cluster.registry_name(role))
    return ray.get(getattr(registry, method).remote(*args), timeout=TIMEOUT_S)


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
    samples = read_lines(trained / "samples.jsonl")
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
    drawn = Counter(s["input"] for s in read_lines(trained / "samples.jsonl"))
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
    lines = read_lines(trained / "samples.jsonl")
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
    gradient = oracle_gradient(
        load_model(setup.model),
        samples,
        denominator="behaviour",
        clip=(0.2, 0.2),
        kl_coefficient=0.05,
        kl_estimator="k3",
        aggregation="sample-mean",
        constant_length=0,
        temperature=1.0,
    )
    norm = torch.stack([value.norm() for value in gradient.values()]).norm().item()
    assert setup.rows("trained")[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_held_out_questions_are_graded_before_and_after(trained):
    first, last = read_lines(trained / "evaluation_metrics.jsonl")
    assert (first["step"], last["step"]) == (0, 6)
    for row in (first, last):
        assert (row["num_questions"], row["num_samples"], row["num_failed"]) == (8, 32, 0)
        assert 0 <= row["eval_reward"] <= 1


def test_workers_serve_what_was_exported(setup, trained, driver):
    """The engines the last weights, the reference the first, to the precision of float32."""
    (export,) = (trained / "hf_format").iterdir()
    assert export.name == f"samples_{BATCHES * BATCH * GROUP}"
    ((text, _, _),) = read_lines(trained / "samples.jsonl")[0]["weights_versions"]
    incarnation = WeightsVersion.parse(text).incarnation
    sampling = SamplingContract(1.0, (1,), 24)
    request = GenerationRequest(0, 0, PROMPT, 8, sampling)
    last, first = (WeightsVersion(incarnation, batches) for batches in (BATCHES, 0))
    for completion in on_a_worker("generation", "generate", request, version=last):
        assert {span.version for span in completion.weights_versions} == {last}
        ids = completion.token_ids
        assert np.abs(logprobs_of(export, ids) - completion.logprobs).max() <= TOLERANCE
        assert np.abs(logprobs_of(setup.model, ids) - completion.logprobs).max() > 1e-3
    scored = LogprobRequest(PROMPT, (ids,), 1.0, first)
    (scores,) = on_a_worker("logprob", "logprobs", scored, version=first)
    assert np.abs(logprobs_of(setup.model, ids) - scores).max() <= TOLERANCE


def on_a_worker(role, method, request, *, version):
    """The answer of a worker that has `version` already: an empty snapshot changes nothing."""
    registry_call(role, "publish", WeightsSnapshot(version, ()), TIMEOUT_S)
    lease = registry_call(role, "acquire", 1.0, version, TIMEOUT_S)
    answer = ray.get(getattr(lease.handle, method).remote(request), timeout=TIMEOUT_S)
    registry_call(role, "release", lease.lease_id)
    registry_call(role, "begin_run")
    return answer


@torch.no_grad()
def logprobs_of(folder, output):
    ids = torch.from_numpy(np.concatenate([PROMPT, output]).astype(np.int64))
    logprobs = load_model(folder)(ids[None]).logits[0].log_softmax(-1)
    return logprobs[len(PROMPT) - 1 : -1].gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()


def test_an_exported_model_joins_a_run_as_a_worker(setup, trained, driver):
    """vLLM loads the export; the newcomer gets the run's weights, then all of its questions."""
    (export,) = (trained / "hf_format").iterdir()
    veterans = [worker.worker_id for worker in registry_call("generation", "members")]
    with setup.train("endless", num_training_batches=100_000, learning_rate=1e-5) as endless:
        wait_until(lambda: setup.rows("endless"), timeout_s=READY_S)
        with setup.workers("generation", num_workers=1, model=export) as newcomer:
            wait_until_registered(newcomer, 1)
            assert len(registry_call("generation", "members")) == 3
            for veteran in veterans:
                registry_call("generation", "drain", veteran)
            num_rows = len(setup.rows("endless"))
            wait_until(lambda: len(setup.rows("endless")) >= num_rows + 5, timeout_s=TIMEOUT_S)
            endless.send(signal.SIGINT)
            assert endless.wait(timeout_s=TIMEOUT_S) != 0
            newcomer.send(signal.SIGINT)
            newcomer.wait(timeout_s=TIMEOUT_S)
    rows = setup.rows("endless")
    assert max(row["mismatch_max"] or 0.0 for row in rows) <= TOLERANCE
    assert all(row["fate_failed"] == 0 for row in rows)
    assert len(registry_call("generation", "members")) == 2


def test_a_run_that_was_interrupted_leaves_its_workers_to_the_next(setup, trained):
    options = {"num_training_batches": 4, "max_staleness": 1, "learning_rate": 2e-3}
    with setup.train("ahead", **options) as command:
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    rows = setup.rows("ahead")
    assert [row["max_lag"] for row in rows] == [0, 1, 1, 1]
    assert rows[0]["mismatch_max"] <= TOLERANCE < rows[2]["mismatch_max"]
    assert sum(row["fate_trained"] + row["fate_zero_contribution"] for row in rows) == 64
