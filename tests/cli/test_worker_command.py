import logging
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner
from fake_cluster import FakeCluster

from async_grpo.cli import worker
from async_grpo.config.roles import role_of
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.launch import interrupts
from async_grpo.util.errors import ConfigError, WorkerError

MODEL = ("--model_path", "model")


@pytest.fixture(autouse=True)
def own_signals_and_logging(monkeypatch):
    monkeypatch.setattr(interrupts, "interrupt_once", lambda: None)
    level = logging.getLogger("async_grpo").level
    yield
    logging.getLogger("async_grpo").setLevel(level)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--num-workers", "0"), "--num-workers must be at least 1, got 0"),
        (("--reward_fns", " , "), "--reward-fns must name at least one adapter"),
        (("--verifier-timeout-s", "0"), "--verifier-timeout-s must be positive, got 0.0"),
        (("--temperature", "-1"), "--temperature must not be negative, got -1.0"),
        (
            ("--mode", "teacher"),
            "--name must be given with --mode teacher or judge, and only then, got ''",
        ),
        (
            ("--name", "math"),
            "--name must be given with --mode teacher or judge, and only then, got 'math'",
        ),
        (
            ("--mode", "judge", "--name", "strict", "--judge-url", "https://a/v1"),
            "--judge-key must name a variable with the key of --judge-url https://a/v1, got ''",
        ),
        (("--judge-url", "https://a/v1"), "--judge-url needs --mode judge, got"),
        (("--model-path", ""), "--model-path must be given with --mode generation, got ''"),
        (
            ("--mode", "verifier", "--num-workers", "2"),
            "--num-workers must be 1 with --mode verifier, got 2",
        ),
        (
            ("--mode", "verifier", "--reward-fns", ""),
            "--reward-fns must name at least one adapter, got ''",
        ),
    ],
)
def test_options_that_cannot_work_are_one_sentence(options, sentence):
    result = CliRunner().invoke(worker.main, [*MODEL, *options])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {sentence}")


@pytest.mark.parametrize(
    ("flags", "role"),
    [
        ("--model-path m", "generation"),
        ("--model-path m --mode logprob", "reference"),
        ("--model-path m --mode teacher --name math", "teacher:math"),
        ("--model-path m --mode judge --name strict", "judge:strict"),
        ("--mode some/file.py:BigIndex", "service:big_index"),
        ("--mode package.module:BigIndex --name Small", "service:Small"),
        ("--mode verifier", "verifier"),
        ("--model-path m --reward-fns ''", "generation"),
    ],
)
def test_a_mode_is_a_role(flags, role, monkeypatch):
    served = []
    monkeypatch.setattr(worker, "serve", served.append)
    assert CliRunner().invoke(worker.main, shlex.split(flags)).exit_code == 0
    (config,) = served
    assert config.role == role_of(config.role).name == role


def test_the_flags_of_the_predecessor_are_understood(monkeypatch):
    served = []
    monkeypatch.setattr(worker, "serve", served.append)
    flags = (
        "--model_path m --mode logprob --tensor_parallel_size 2 --max_num_seqs 3 --overhead_seqs 4 "
        "--write_failed_generation_samples --reward_fns a,b --global_num_verifiers 5 "
        "--temperature 0.5 --max_tokens_per_gpu 6 --enable_prefix_caching"
    )
    assert CliRunner().invoke(worker.main, flags.split()).exit_code == 0
    (config,) = served
    assert (config.model_path, config.mode, config.reward_names) == ("m", "logprob", ("a", "b"))
    assert (config.tensor_parallel_size, config.max_num_seqs, config.overhead_seqs) == (2, 3, 4)
    assert (config.global_num_verifiers, config.max_tokens_per_gpu) == (5, 6)
    assert (config.temperature, config.enable_prefix_caching) == (0.5, True)
    assert config.write_failed_generation_samples


def test_a_dispatcher_imports_nothing_that_its_workers_import_at_the_same_time():
    """Torch and transformers take seconds, in which no worker would be loading yet."""
    code = (
        "import sys, ray\n"
        "from async_grpo.cli import worker\n"
        "from async_grpo.launch import actors, dispatcher\n"
        "from async_grpo.config.worker_config import WorkerConfig\n"
        "from async_grpo.rollout.logprob_worker import LogprobWorker\n"
        "from async_grpo.rollout.generation_worker import GenerationWorker\n"
        "from async_grpo.controller.find import find_or_make_controller\n"
        "from async_grpo.verification.pool import VerifierPool\n"
        "worker._check_model(WorkerConfig(model_path='sample-data/tiny-countdown'))\n"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (KeyboardInterrupt(), 0, "stopped\n"),
        (WorkerError("worker x was excluded: late"), 1, "error: worker x was excluded: late\n"),
    ],
)
def test_ctrl_c_is_how_a_dispatcher_is_meant_to_end(end, code, said, monkeypatch):
    def serve(_config):
        raise end

    monkeypatch.setattr(worker, "serve", serve)
    result = CliRunner().invoke(worker.main, MODEL)
    assert (result.exit_code, result.output) == (code, said)


@pytest.mark.parametrize("mode", ["generation", "logprob"])
def test_a_model_without_its_tokenizer_is_refused_before_anything_loads(mode, tmp_path):
    for name in ("config.json", "pytorch_model.bin", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    result = CliRunner().invoke(worker.main, ["--model-path", str(tmp_path), "--mode", mode])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: a model folder must hold its tokenizer (tokenizer.json")
    assert result.stderr.endswith(f"{tmp_path} has none: copy its files there\n")


def test_an_adapter_without_its_base_is_refused_before_anything_loads(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/x/y"}')
    (tmp_path / "adapter_model.safetensors").write_text("")
    result = CliRunner().invoke(worker.main, ["--model-path", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: an adapter needs the model that it belongs to")


@pytest.mark.parametrize(
    ("error", "waits"), [(ConfigError("no"), False), (WorkerError("no"), True)]
)
def test_only_an_error_that_the_cluster_s_end_may_explain_waits_for_it(error, waits, monkeypatch):
    class Failing(FakeCluster):
        looked = 0

        def resources_here(self):
            raise error

        def has_ended(self, places):
            self.looked += 1

    cluster = Failing()
    monkeypatch.setattr(worker.deadlines, "HEAD_ENDED_S", 0.0)
    with pytest.raises(type(error)):
        worker.serve_on(
            cluster, WorkerConfig(mode="verifier", model_path="", reward_fns="countdown")
        )
    assert bool(cluster.looked) == waits
