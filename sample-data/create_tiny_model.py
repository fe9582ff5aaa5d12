"""Make a tiny Qwen3 (1M parameters, characters as tokens) that half knows a countdown puzzle.

    OMP_NUM_THREADS=1 python sample-data/create_tiny_model.py --output sample-data/tiny-countdown

It is warm-started on demonstrations by the project's own trainer, in three stages: attempts teach
the form, right answers teach the task, and a short last stage of mostly wrong ones spreads the
policy, so that several samples find most answers and there is something left to learn. Data and
weights depend on `--seed` alone, up to rounding.
"""

from __future__ import annotations

import os
import random
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from atomic_files import draft_beside, replace_folder, write_jsonl
from countdown_demonstrations import NUM_HELD_OUT, demonstrations, split_tasks
from create_count_down import CountDownTask
from measure_countdown import measure

HERE = Path(__file__).resolve().parent
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "\n " + string.digits + string.punctuation + string.ascii_letters
VOCAB_SIZE = 128
MAX_TOKENS_PER_GPU = 4096


@dataclass(frozen=True, slots=True)
class Stage:
    """One supervised run on freshly drawn demonstrations."""

    name: str
    num_steps: int
    batch_size: int  # pairs
    learning_rate: float
    share_right: float  # of the answers
    num_lines: tuple[float, ...]  # chances of answers of 1, 2, ... lines


STAGES = (
    Stage("form", 800, 32, learning_rate=2e-3, share_right=0.1, num_lines=(0.5, 0.3, 0.2)),
    Stage("task", 2000, 64, learning_rate=2e-3, share_right=1.0, num_lines=(0.7, 0.2, 0.1)),
    Stage("spread", 60, 32, learning_rate=5e-4, share_right=0.4, num_lines=(0.7, 0.2, 0.1)),
)


def make_tokenizer() -> Any:
    """One token a character; decoding gives the text back exactly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, eos, unknown = SPECIAL_TOKENS
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=eos,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )


def make_model(*, seed: int) -> Any:
    """A Qwen3 with random float32 weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).float()


def train(model: Path, *, stage: Stage, data: Path, num_processes: int, seed: int) -> Path:
    """Run the project's trainer on `data`; returns the folder of the trained model."""
    output = data.with_suffix("")
    arguments = {
        "objective": "sft",
        "model-name-or-path": model,
        "data-path": data,
        "output-dir": output,
        "num-training-batches": stage.num_steps,
        "batch-size": stage.batch_size,
        "learning-rate": stage.learning_rate,
        "lr-scheduler": "cosine",
        "num-warmup-steps": stage.num_steps // 20,
        "max-tokens-per-gpu": MAX_TOKENS_PER_GPU,
        "infinite-sampler-seed": seed,
        "trackers": "",
    }
    options = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    python = [sys.executable, *(launcher if num_processes > 1 else ())]
    # The cores are the processes': a thread each is fastest for a model this small.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*python, str(HERE.parent / "trainer_core.py"), *options]
    if subprocess.run(command, env=environment).returncode:
        raise click.ClickException(f"the trainer failed in stage {stage.name}: see above")
    return output / "hf_format" / f"samples_{stage.num_steps * stage.batch_size}"


def warm_start(
    folder: Path, *, tasks: Sequence[CountDownTask], stages: Sequence[Stage], **run: Any
) -> Path:
    """Make the model and train it in stages, all in `folder`; `run` is `train`'s other options."""
    model = folder / "untrained"
    make_model(seed=run["seed"]).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    for stage in stages:
        click.echo(f"stage {stage.name}: {stage.num_steps} steps of {stage.batch_size} answers")
        data = folder / f"{stage.name}.jsonl"
        pairs = demonstrations(
            tasks,
            count=stage.num_steps * stage.batch_size,
            share_right=stage.share_right,
            num_lines=stage.num_lines,
            rng=random.Random(f"{run['seed']} {stage.name}"),
        )
        write_jsonl(data, rows=pairs)
        model = train(model, stage=stage, data=data, **run)
    return model


def scaled(stage: Stage, *, scale: float) -> Stage:
    return replace(stage, num_steps=max(1, round(stage.num_steps * scale)))


def describe(*, seed: int, scale: float, figures: object) -> str:
    """The README of the model's folder."""
    command = f"python sample-data/create_tiny_model.py --seed {seed} --scale {scale:g}"
    return (
        "# A tiny countdown model\n\n"
        f"A Qwen3 with 1M parameters and characters as tokens, made by `{command}`.\n"
        f"On {NUM_HELD_OUT} held-out questions, 8 samples each at temperature 1: {figures}.\n"
    )


@click.command(help=__doc__)
@click.option("--seed", default=0, show_default=True, help="Of weights, data and their order.")
@click.option(
    "--output",
    default=HERE / "tiny-countdown",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the model; replaced.",
)
@click.option(
    "--scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Factor on the steps of every stage: 0.01 for a quick look.",
)
@click.option(
    "--num-processes",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Trainer ranks.",
)
def main(seed: int, output: Path, scale: float, num_processes: int) -> None:
    tasks, held_out = split_tasks()
    stages = [scaled(stage, scale=scale) for stage in STAGES]
    with tempfile.TemporaryDirectory(prefix="tiny-model-") as folder, draft_beside(output) as draft:
        trained = warm_start(
            Path(folder), tasks=tasks, stages=stages, num_processes=num_processes, seed=seed
        )
        click.echo("measuring")
        figures = measure(trained, tasks=held_out)
        # Without the private file modes that safetensors gives.
        shutil.copytree(trained, draft, copy_function=shutil.copyfile)
        (draft / "README.md").write_text(describe(seed=seed, scale=scale, figures=figures))
        replace_folder(output, draft=draft)
    click.echo(f"wrote {output}: {figures}")


if __name__ == "__main__":
    main()
