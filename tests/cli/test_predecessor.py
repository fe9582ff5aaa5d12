"""Every option of the predecessor's commands is taken with its meaning, or refused in a sentence.

Its command lines as a whole are in tests/integration/test_original_readme.py.
"""

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from async_grpo.cli import train, use_run
from async_grpo.config.train_config import TrainConfig
from async_grpo.util.errors import AsyncGrpoError

MODEL_AND_DATA = "--model-name-or-path m --data-path d "
ALL_OPTIONS = (
    "--learning-rate 2e-6 --batch-size 128 --lr-scheduler constant_with_warmup --num-warmup-steps 5"
    " --experience-batcher-name mine --max-tokens-per-gpu 36000 --temperature 0.6"
    " --max-generation-tokens 8192 --no-insert-reasoning-phrases --min-samples-per-checkpoint 30000"
    " --output-dir out --infinite-sampler-seed 53 --samples-per-question 16"
    " --constant-length-samples None --dump-samples-filename None --clip-low 0.1 --clip-high 0.28"
    " --clip-ratio-c 10 --num-training-batches 7 --train-minibatch-size 32 --logging-level critical"
    " --global-rank 0 --use-torch-compile --loss-chunksize None"
    " --fsdp-sharding-strategy SHARD_GRAD_OP"
)


class Parsed(AsyncGrpoError):
    """Ends a command where its options are read."""


def parse(arguments, monkeypatch):
    """(what click made of it, the config or None)."""
    configs = []

    def read(given):
        configs.append(TrainConfig.from_options(given))
        raise Parsed("read")

    monkeypatch.setattr(train, "TrainConfig", SimpleNamespace(from_options=read))
    result = CliRunner().invoke(train.main, (MODEL_AND_DATA + arguments).split())
    return result, next(iter(configs), None)


def test_every_option_of_the_trainer_is_understood(monkeypatch):
    result, config = parse(ALL_OPTIONS, monkeypatch)
    assert result.stderr == "error: read\n"
    assert config == TrainConfig(
        model_name_or_path="m",
        data_path="d",
        learning_rate=2e-6,
        batch_size=128,
        num_warmup_steps=5,
        max_tokens_per_gpu=36000,
        temperature=0.6,
        max_generation_tokens=8192,
        min_samples_per_checkpoint=30000,
        output_dir="out",
        infinite_sampler_seed=53,
        samples_per_question=16,
        constant_length_samples=0,
        dump_samples_filename="",
        clip_low=0.1,
        clip_high=0.28,
        dual_clip=10.0,
        num_training_batches=7,
        train_minibatch_size=32,
        logging_level="CRITICAL",
        use_torch_compile=True,
        loss_chunksize=0,
        fsdp_sharding_strategy="SHARD_GRAD_OP",
    )
    assert config.chunk_size == config.batching.max_tokens_per_gpu


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--insert-reasoning-phrases", "--insert-reasoning-phrases must not be given, outputs are"),
        ("--insert_reasoning_phrases True", "--insert-reasoning-phrases must not be given"),
        ("--global-rank 3", "--global-rank must be the rank that torchrun gave this process (0)"),
        ("--fsdp-shard-ranks 8", "--fsdp-shard-ranks needs --fsdp-sharding-strategy HYBRID_SHARD"),
        ("--tensor-parallel-size 2", "--tensor-parallel-size must be 1 for a trainer"),
        ("--pipeline_parallel_size 2", "--pipeline-parallel-size must be 1 for a trainer"),
        ("--context-parallel-size 4", "--context-parallel-size must be 1 for a trainer"),
        ("--lr-scheduler polynomial", "'polynomial' is not one of constant, constant_with_warmup"),
        ("--train-minibatch-size 4000", "--train-minibatch-size counts questions and must divide"),
    ],
)
def test_what_cannot_be_meant_here_is_refused_by_name(arguments, sentence, monkeypatch):
    result, _ = parse(arguments, monkeypatch)
    assert result.exit_code != 0
    assert sentence in result.stderr.splitlines()[-1]


def test_the_rank_may_be_repeated(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    _, config = parse("--global-rank 3 --insert-reasoning-phrases False", monkeypatch)
    assert config is not None


def test_every_option_of_its_plot_is_understood(tmp_path):
    file, picture = tmp_path / "training_metrics.jsonl", tmp_path / "picture.svg"
    rows = [{"step": step, "avg_reward": 0.1 * step, "entropy": 1.0} for step in (1, 2, 3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--name mine --variable avg_reward -v entropy --x_key step --smooth --smooth-window 2"
    result = CliRunner().invoke(
        use_run.plot_commands, ["plot", str(file), *options.split(), "--output", str(picture)]
    )
    assert (result.exit_code, picture.exists()) == (0, True), result.output
    assert "entropy" in CliRunner().invoke(use_run.plot_commands, ["info", str(file)]).stdout
    assert "-r, --remote" in CliRunner().invoke(use_run.plot_commands, ["plot", "--help"]).stdout
