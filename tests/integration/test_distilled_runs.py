"""Two teachers of two kinds of questions, asked by real runs through the command line.

Teachers, controller, object store and ranks are real; only the engine's tokens are drawn at random.
"""

import contextlib
import functools
import json
import math
import signal

import pytest
import torch
from commands import Command, trainer, wait_until
from loops import read_lines, read_samples, wait_until_registered
from private_cluster import environment
from tiny_models import load_model, make_model

pytestmark = pytest.mark.integration
NAMESPACE = ("--namespace", "distillation")
READY_S = 180.0  # of commands on a busy machine
BATCHES, BATCH, GROUP = 2, 4, 4
ALPHA, TAU, GAMMA, ETA = 0.3, 1.5, 0.7, 0.5
KINDS = {"plus": "a", "times": "b"}
PAYLOADS = {
    "topk": ("--teacher-payload", "topk", "--gkd-top-k", 5),
    "hidden": ("--teacher-payload", "hidden"),
    "logits": ("--teacher-payload", "logits"),
    "given": ("--gkd-top-k", 5, "--gkd-lambda", 0.5),  # and half of the slots of pairs
}
# Logits by ticket are what a run with express falls back on: shown below. "given" has top-k too.
# One rank: hidden states reach two in test_teacher_faults.py, whole distributions below.
slow = pytest.mark.slow
SHOWN = [*(pytest.param(payload, marks=slow) for payload in ("topk", "logits")), "hidden", "given"]
TOP_K = {"topk": 5, "given": 5}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Folders of two models of other sizes with the same tokens, by name; one is padded."""
    sizes = {"a": {"hidden_size": 32}, "b": {"hidden_size": 96, "vocab_size": 136}}
    return {
        name: make_model(tmp_path_factory.mktemp(f"teacher-{name}"), tied=False, **size)
        for name, size in sizes.items()
    }


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory):
    file = tmp_path_factory.mktemp("puzzles") / "puzzles.jsonl"
    lines = [
        {"input": f"{n}{'+' if kind == 'plus' else '*'}2=", "answer": "7", "dataset_type": kind}
        for n in range(4)
        for kind in KINDS
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


@pytest.fixture(scope="module")
def address(ray_cluster, tiny_model, teachers, sevens):
    """The cluster, with a scripted engine and both teachers."""
    scripted = environment(PYTHONPATH="tests")
    common = ("--ray-address", ray_cluster, *NAMESPACE)
    commands = [
        Command(
            *("-m", "faults.scripted_dispatcher", "--model-path", tiny_model),
            *("--reward-fns", sevens, "--global-num-verifiers", 1, *common),
            env=scripted,
        )
    ]
    for name, folder in teachers.items():
        command = Command(
            *("worker_dispatcher.py", "--mode", "teacher", "--name", name),
            *("--model-path", folder, "--max-tokens-per-gpu", 512, *common),
            env=scripted,
        )
        commands.append(command)
    try:
        for command in commands:
            command.wait_for("registered", timeout_s=READY_S)
        yield ray_cluster
    finally:
        for command in commands:
            command.__exit__()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = [
        {"input": f"{n}{sign}2=", "completion": "7" * (1 + n), "dataset_type": kind}
        for n in range(4)
        for sign, kind in (("+", "plus"), ("*", "times"))
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


@pytest.fixture(scope="module")
def run_of(address, tiny_model, puzzles, pairs, tmp_path_factory):
    """What the run of a payload has left, which is made when somebody asks."""

    @functools.cache
    def run_of(payload):
        folder = tmp_path_factory.mktemp(payload)
        given = ("--pairs-path", pairs) if payload == "given" else ()
        run = trainer(
            *(address, tiny_model, puzzles, folder, *NAMESPACE, *PAYLOADS[payload], *given),
            *("--teacher-for", "plus=a", "--teacher-for", "times=b"),
            *("--gkd-coefficient", GAMMA, "--gkd-alpha", ALPHA, "--gkd-temperature", TAU),
            *("--opd-coefficient", ETA, "--num-training-batches", BATCHES),
            *("--max-staleness", 0, "--deterministic", "--dump-token-columns", True),
        )
        with run:
            assert run.wait(timeout_s=READY_S) == 0, run.err[-4000:]
        return folder

    return run_of


def first_loss(folder, model, teachers, *, top_k):
    """The loss of the first step, of whole float32 distributions in this process."""
    losses = []
    for sample in (s for s in read_samples(folder) if s["batch"] == 0):
        prompt, output = sample["input_token_ids"], sample["output_token_ids"]
        logits, taught = (
            each(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].double()
            for each in (model, teachers["a" if "+" in sample["input"] else "b"])
        )
        taught = taught[:, : logits.shape[1]]  # the tokens that both have
        chosen = torch.tensor(output)[:, None]
        lp, tea = (each.log_softmax(-1).gather(1, chosen)[:, 0] for each in (logits, taught))
        divergence = cut_divergence(logits / TAU, taught / TAU, top_k=top_k)
        advantage = 0.0 if sample["given"] else sample["advantage"] + ETA * (tea - lp)
        losses.append((-advantage + GAMMA * divergence).mean())
    return torch.stack(losses).mean().item()


@torch.no_grad()
def first_loss_of_one_teacher(folder, model, teacher):
    """The same where it teaches every question whole distributions."""
    taught = load_model(teacher)
    return first_loss(folder, load_model(model), {"a": taught, "b": taught}, top_k=0)


def cut_divergence(student, teacher, *, top_k):
    """JSD of the teacher's `top_k` tokens and one cell for the rest, [L]."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    if top_k:
        ids = q.topk(top_k).indices
        p, q = (
            torch.cat([kept := each.gather(1, ids), 1 - kept.sum(1, keepdim=True)], dim=1)
            for each in (p, q)
        )
    m = (1 - ALPHA) * p + ALPHA * q
    to_m = [(each * (each / m).log()).sum(1) for each in (q, p)]
    return ALPHA * to_m[0] + (1 - ALPHA) * to_m[1]


@pytest.mark.parametrize("payload", SHOWN)
def test_the_first_loss_is_that_of_whole_distributions(payload, run_of, tiny_model, teachers):
    models = {name: load_model(folder) for name, folder in teachers.items()}
    with torch.no_grad():
        expected = first_loss(
            run_of(payload), load_model(tiny_model), models, top_k=TOP_K.get(payload, 0)
        )
    first = read_lines(run_of(payload) / "training_metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("payload", SHOWN)
def test_every_step_says_what_its_teachers_did(payload, run_of):
    for row in read_lines(run_of(payload) / "training_metrics.jsonl"):
        num_given = BATCH * GROUP // 2 if payload == "given" else 0
        assert (row["trained_samples"], row["given_samples"]) == (BATCH * GROUP, num_given)
        assert row["num_samples"] == BATCH * GROUP - num_given
        given = [s for s in read_samples(run_of(payload)) if s["given"]]
        given = [len(s["output_token_ids"]) for s in given if s["batch"] == row["iteration"]]
        assert len(given) == num_given
        num_sampled = row["avg_output_tokens"] * row["num_samples"]
        assert row["teacher_tokens"] == pytest.approx(num_sampled + sum(given))
        assert row["lost_payloads"] == 0
        assert all(math.isfinite(row[name]) for name in ("loss", "grad_norm", "gkd_divergence"))


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        pytest.param("1x1", 1, id="alone", marks=slow),
        pytest.param("1x1", 2, id="two ranks", marks=slow),  # until a teacher is killed: below
        pytest.param("2x1", 1, id="tickets", marks=slow),  # the same, and test_distillation.py
    ],
)
def test_express_trains_whole_distributions(
    mesh, ranks, address, tiny_model, puzzles, teachers, tmp_path
):
    """Of 2x1 one worker is missing: logits go by the object store."""
    taught = ("b", teachers["b"])
    by_ticket = trained_by_express(address, tiny_model, puzzles, tmp_path, taught, mesh, ranks)
    assert (sum(by_ticket) > 0) == (mesh == "2x1")


def trained_by_express(address, model, puzzles, folder, taught, mesh, ranks):
    """A whole run of a teacher (name, folder); how many payloads came by ticket in each step."""
    name, teacher = taught
    run = trainer(
        *(address, model, puzzles, folder, *NAMESPACE, *PAYLOADS["logits"]),
        *("--teacher-for", name, "--express", mesh, "--opd-coefficient", ETA),
        *("--gkd-coefficient", GAMMA, "--gkd-alpha", ALPHA, "--gkd-temperature", TAU),
        *("--num-training-batches", BATCHES, "--max-staleness", 0, "--deterministic"),
        *("--dump-token-columns", True),
        ranks=ranks,
    )
    with run:
        assert run.wait(timeout_s=READY_S) == 0, run.err[-4000:]
    expected = first_loss_of_one_teacher(folder, model, teacher)
    rows = read_lines(folder / "training_metrics.jsonl")
    assert rows[0]["loss"] == pytest.approx(expected, abs=1e-5)
    assert all(row["trained_samples"] == row["num_samples"] == BATCH * GROUP for row in rows)
    return [row["lost_payloads"] for row in rows]  # of the step before, for the most part


@slow
@pytest.mark.parametrize(("num_workers", "ranks"), [(1, 1), (1, 2), (2, 2)])
def test_ranks_of_sharded_teachers_send_their_logits_by_express(
    num_workers, ranks, address, tiny_model, puzzles, teachers, tmp_path
):
    name = f"sharded{num_workers}{ranks}"  # in case one before it has not ended yet
    sharded = Command(
        *("worker_dispatcher.py", "--mode", "teacher", "--name", name, "--ray-address", address),
        *("--model-path", teachers["b"], "--max-tokens-per-gpu", 512, *NAMESPACE),
        *("--scorer-ranks", 2, "--num-workers", num_workers),
    )
    with sharded:
        wait_until_registered(sharded, num_workers)
        taught, mesh = (name, teachers["b"]), f"{num_workers}x2"
        lost = trained_by_express(address, tiny_model, puzzles, tmp_path, taught, mesh, ranks)
        sharded.send(signal.SIGTERM)
        sharded.wait(timeout_s=READY_S)
    assert sum(lost) == 0


def test_a_teacher_that_is_killed_during_express_costs_no_sample(
    address, tiny_model, puzzles, teachers, tmp_path
):
    """What it had not sent comes by ticket from who is left; every sample is trained once.

    Before that the two ranks train the whole distributions.
    """
    num_batches, metrics = 12, tmp_path / "run" / "training_metrics.jsonl"
    second = Command(
        *("worker_dispatcher.py", "--mode", "teacher", "--name", "b", "--ray-address", address),
        *("--model-path", teachers["b"], "--max-tokens-per-gpu", 512, *NAMESPACE),
    )
    options = (
        *("--teacher-for", "b", "--express", "2x1", "--opd-coefficient", ETA),
        *("--gkd-coefficient", GAMMA, "--gkd-alpha", ALPHA, "--gkd-temperature", TAU),
        *("--num-training-batches", num_batches, "--max-staleness", 0),
        *("--dump-token-columns", True),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(second).wait_for("registered", timeout_s=READY_S)
        run = trainer(
            *(address, tiny_model, puzzles, metrics.parent, *NAMESPACE, *PAYLOADS["logits"]),
            *options,
            ranks=2,
        )
        stack.enter_context(run)
        wait_until(lambda: metrics.exists() and len(read_lines(metrics)) > 3, timeout_s=READY_S)
        second.send(signal.SIGKILL)  # its worker ends with it
        assert run.wait(timeout_s=READY_S) == 0, run.err[-4000:]
    rows = read_lines(metrics)
    assert len(rows) == num_batches
    assert all(row["trained_samples"] == row["num_samples"] == BATCH * GROUP for row in rows)
    by_ticket = [row["lost_payloads"] for row in rows]
    assert by_ticket[1] == 0 < by_ticket[-1]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert rows[0]["loss"] == pytest.approx(
        first_loss_of_one_teacher(metrics.parent, tiny_model, teachers["b"]), abs=1e-5
    )


@slow
def test_pairs_alone_need_no_worker_but_their_teacher(
    address, tiny_model, puzzles, pairs, teachers, tmp_path
):
    """In a namespace of their own, where there is no engine and nobody grades."""
    apart = ("--namespace", "pairs-alone")
    own = Command(
        *("worker_dispatcher.py", "--mode", "teacher", "--name", "a", "--ray-address", address),
        *("--model-path", teachers["a"], "--max-tokens-per-gpu", 512, *apart),
    )
    with own:
        own.wait_for("registered", timeout_s=READY_S)
        run = trainer(
            *(address, tiny_model, puzzles, tmp_path / "run", *apart, "--teacher-for", "a"),
            *("--gkd-coefficient", 1, "--gkd-lambda", 0, "--pairs-path", pairs),
            *("--num-training-batches", BATCHES),
        )
        with run:
            assert run.wait(timeout_s=READY_S) == 0, run.err[-4000:]
    rows = read_lines(tmp_path / "run" / "training_metrics.jsonl")
    assert [row["given_samples"] for row in rows] == [BATCH * GROUP] * BATCHES
    assert all(row["grad_norm"] > 0 for row in rows)


@slow  # test_teaching.py has the sentence
def test_a_type_without_a_teacher_is_refused(address, tiny_model, puzzles, tmp_path):
    run = trainer(
        *(address, tiny_model, puzzles, tmp_path / "run", *NAMESPACE),
        *("--teacher-for", "plus=a", "--gkd-coefficient", 1),
    )
    with run:
        assert run.wait(timeout_s=READY_S) == 1
    assert "'times' has none" in run.err
