"""Everything a user can get wrong: one sentence, a code that is not 0, and nothing left behind."""

import json
import re
import shutil
import signal
from functools import partial

import pytest
from commands import dispatcher, trainer, under_torchrun
from private_cluster import PrivateCluster, environment

from async_grpo.run.output_folder import LOCK_FILE

pytestmark = pytest.mark.integration
TIMEOUT_S = 180  # an error takes seconds, but not on a busy machine
again = partial(pytest.param, marks=pytest.mark.slow)  # the sentence has a test of its own room
NOWHERE = "127.0.0.1:1"


def only_error(command):
    """The one sentence that a command has failed with, all that it printed."""
    with command:
        assert command.wait(timeout_s=TIMEOUT_S) == 1, command.err
        (line,) = [line for line in command.err.splitlines() if not line.startswith("INFO ")]
        assert all(" INFO " in line for line in command.out.splitlines())
        assert line.startswith("error: ")
        assert command.family() == set()
        return line


def left_in(folder):
    """What a trainer has left there, beside the file that it locks."""
    return {file.name for file in folder.glob("*")} - {LOCK_FILE}


def copy_of(model, folder, **config):
    shutil.copytree(model, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def no_weights(model, tmp_path):
    folder = copy_of(model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    return folder


def small_vocabulary(model, tmp_path):
    return copy_of(model, tmp_path / "model", vocab_size=50)


def nothing(_model, tmp_path):
    return tmp_path / "nothing"


@pytest.mark.parametrize(
    ("command", "spoilt", "sentence"),
    [
        ("dispatcher", nothing, r"'.*nothing' is neither"),
        again("trainer", no_weights, r"must hold weights"),
        again(
            "trainer", small_vocabulary, r"tokenizer .* must not know more tokens .* \(50\), got 78"
        ),
    ],
)
def test_a_model_that_cannot_be_used(
    command, spoilt, sentence, ray_cluster, tiny_model, questions, tmp_path
):
    model, output = spoilt(tiny_model, tmp_path), tmp_path / "run"
    if command == "trainer":
        assert re.search(sentence, only_error(trainer(ray_cluster, model, questions, output)))
        assert left_in(output) == set()
    else:
        assert re.search(sentence, only_error(dispatcher(NOWHERE, model)))


@pytest.mark.parametrize(
    ("line", "options", "sentence"),
    [
        again(None, (), r"--data-path must be an existing file"),
        again('{"input": 7}', (), r"line 2, column 'input': expected non-empty text, got 7"),
        again(
            '{"input": "1234567890"}',
            ("--max-tokens-per-gpu", 25),
            r"line 2, column 'input': expected a prompt of at most 9 tokens .*, got 10",
        ),
    ],
)
def test_questions_that_cannot_be_used(line, options, sentence, ray_cluster, tiny_model, tmp_path):
    data, output = tmp_path / "questions.jsonl", tmp_path / "run"
    if line is not None:
        data.write_text('{"input": "1+2="}\n' + line)
    error = only_error(trainer(ray_cluster, tiny_model, data, output, *options))
    assert re.search(sentence, error)
    assert left_in(output) == set()


@pytest.mark.slow  # tests/checkpoint/test_resume.py has the sentence
def test_an_output_folder_that_holds_a_run(ray_cluster, tiny_model, questions, tmp_path):
    (tmp_path / "training_metrics.jsonl").write_text("precious")
    error = only_error(trainer(ray_cluster, tiny_model, questions, tmp_path))
    assert "holds a run already, and no training_params.json says how it was started" in error
    assert "name another folder, or replace it with --overwrite" in error
    assert (tmp_path / "training_metrics.jsonl").read_text() == "precious"


def test_no_cluster_at_the_address(tiny_model, questions, tmp_path):
    error = only_error(trainer(NOWHERE, tiny_model, questions, tmp_path / "run"))
    assert "no Ray cluster answers at 127.0.0.1:1 (Connection refused): start one with" in error
    assert only_error(dispatcher("auto", tiny_model, env=environment(RAY_ADDRESS=NOWHERE))) == error


@pytest.mark.slow  # tests/run/test_recruitment.py has the sentence, and a run waits below
def test_no_worker_registers_in_time(ray_cluster, tiny_model, questions, tmp_path):
    options = ("--namespace", "nobody", "--worker-timeout-s", 1)
    error = only_error(trainer(ray_cluster, tiny_model, questions, tmp_path / "run", *options))
    assert "no worker registered within --worker-timeout-s 1: the run needs a generation" in error
    assert f"worker_dispatcher.py --model-path {tiny_model} --mode generation" in error
    assert left_in(tmp_path / "run") == set()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        again(
            ("--reward-fns", "nonsense"),
            "--reward-fns must be adapters of reward_registry, got 'nonsense': choose from",
        ),
        again(
            ("--mode", "logprob", "--num-workers", 9),
            "9 reference worker(s) need 9 CPU of Ray on this node, 8 of 8 are free",
        ),
        again(("--max-model-len", 513), "--max-model-len must not exceed the 512 positions"),
    ],
)
def test_workers_that_cannot_be_started(options, sentence, ray_cluster, tiny_model):
    options = ("--namespace", "unlucky", *options)
    assert sentence in only_error(dispatcher(ray_cluster, tiny_model, *options))


@pytest.mark.slow  # tests/launch/test_local_ranks.py has all ways in which its ranks end
def test_our_own_launcher_ends_with_the_sentence_alone(ray_cluster, tiny_model, tmp_path):
    data = tmp_path / "questions.jsonl"
    data.write_text('{"input": "1+2="}\n{"input": 7}')
    command = trainer(ray_cluster, tiny_model, data, tmp_path / "run", ranks=2)
    assert "line 2, column 'input': expected non-empty text, got 7" in only_error(command)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_ranks_that_wait_for_workers_end_with_the_sentence_alone(
    number, code, ray_cluster, tiny_model, questions, tmp_path
):
    run = (ray_cluster, tiny_model, questions, tmp_path / "run", "--namespace", "nobody")
    with trainer(*run, ranks=2) as command:
        command.wait_for("waiting for a generation worker to load", timeout_s=TIMEOUT_S)
        command.send(number)
        assert command.wait(timeout_s=60) == code
        assert command.err == "interrupted; no checkpoint was saved yet\n"
        assert command.family() == set()


def test_torchrun_ends_with_the_one_sentence(tiny_model, questions, tmp_path):
    data = tmp_path / "nothing.jsonl"
    with under_torchrun(NOWHERE, tiny_model, data, tmp_path / "run", ranks=2) as command:
        assert command.wait(timeout_s=TIMEOUT_S) == 1
        lines = command.err.splitlines()
        sentences = [line for line in lines if "--data-path must be an existing file" in line]
        assert len(sentences) == 2
        assert lines.index(sentences[0]) < lines.index("Traceback (most recent call last):")
        assert sentences[0].startswith("error: ")
        assert sentences[1].startswith("  traceback : error: ")
        assert sentences[1] == lines[-2]
        assert command.family() == set()


@pytest.mark.slow  # a cluster of its own, 50 s; tests/test_ray_token.py has the sentences
def test_a_cluster_takes_its_own_token_only(tiny_model, questions, tmp_path):
    home, stranger = (home_with(tmp_path / name, token=name * 32) for name in ("ours", "other"))
    cluster = PrivateCluster(env=environment(HOME=home, RAY_AUTH_MODE="token"))

    def trains(home):
        options = ("--namespace", "nobody", "--worker-timeout-s", 1)
        output = tmp_path / "run"
        return trainer(cluster.address, tiny_model, questions, output, *options, env=at(home))

    try:
        sentence = f"refuses the token of {stranger}/.ray/auth_token: put there"
        refused = only_error(dispatcher(cluster.address, tiny_model, env=at(stranger)))
        assert refused.startswith(f"error: the Ray cluster at {cluster.address} {sentence}")
        assert "no worker registered within --worker-timeout-s 1" in only_error(trains(home))
        with dispatcher(cluster.address, tiny_model, "--mode", "logprob", env=at(home)) as command:
            command.wait_for("registered", timeout_s=TIMEOUT_S)
            cluster.stop()
            assert command.wait(timeout_s=30) == 0
            assert command.out.endswith("the Ray cluster has ended, and the workers with it\n")
            assert "Traceback" not in command.err
    finally:
        cluster.stop()


def home_with(folder, *, token):
    (folder / ".ray").mkdir(parents=True)
    (folder / ".ray" / "auth_token").write_text(token)
    return str(folder)


def at(home):
    """A user's variables: nobody sets Ray's own mode."""
    variables = environment(HOME=home)
    del variables["RAY_AUTH_MODE"]
    return variables
