"""Make a tiny Qwen3 with characters as tokens that knows, or half knows, a countdown puzzle.

    OMP_NUM_THREADS=1 python sample-data/create_tiny_model.py
    OMP_NUM_THREADS=1 python sample-data/create_tiny_model.py --kind teacher

It is warm-started on demonstrations by the project's own trainer. The `student`, the quick start's
model, in three stages: attempts teach the form, right answers teach the task, and a short last
stage of mostly wrong ones spreads the policy, so that several samples find most answers and there
is something left to learn. The others are the teachers of the examples of distillation, and have
seen right answers in one line only: the larger `teacher` to sums and differences, `mul-teacher` to
products and quotients, of which the student has seen none.
Data and weights depend on `--kind` and `--seed` alone, up to rounding.
"""

from __future__ import annotations

import os
import random
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from atomic_files import draft_beside, replace_folder, write_jsonl
from countdown_demonstrations import (
    NUM_HELD_OUT,
    PUZZLES,
    demonstrations,
    first_answers,
    split_tasks,
)
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
    share_right: float = 1.0  # of the answers
    num_lines: tuple[float, ...] = ()  # chances of answers of 1, 2, ... lines; none: first answers


STAGES = (
    Stage("form", 800, 32, learning_rate=2e-3, share_right=0.1, num_lines=(0.5, 0.3, 0.2)),
    Stage("task", 2000, 64, learning_rate=2e-3, share_right=1.0, num_lines=(0.7, 0.2, 0.1)),
    Stage("spread", 60, 32, learning_rate=5e-4, share_right=0.4, num_lines=(0.7, 0.2, 0.1)),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A model that this script makes."""

    folder: str  # in this one
    puzzles: str  # of `countdown_demonstrations.PUZZLES`
    stages: tuple[Stage, ...]
    dtype: str = "float32"  # of the file's weights
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 2


KINDS = {
    "student": Kind("tiny-countdown", "add", STAGES),
    # In the student's own style: its equations have their numbers in any order.
    "teacher": Kind(
        "tiny-teacher",
        "add",
        (Stage("answers", 1200, 64, learning_rate=2e-3, num_lines=(1.0,)),),
        dtype="bfloat16",
        hidden_size=192,
        num_heads=3,
    ),
    "mul-teacher": Kind(
        "tiny-teacher-mul",
        "mul",
        (Stage("answers", 1000, 64, learning_rate=2e-3),),
        dtype="bfloat16",
    ),
}


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


def make_model(kind: Kind, *, seed: int) -> Any:
    """A Qwen3 with random float32 weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=kind.hidden_size,
        intermediate_size=3 * kind.hidden_size,
        num_hidden_layers=kind.num_layers,
        num_attention_heads=kind.num_heads,
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


def warm_start(folder: Path, *, kind: Kind, tasks: Sequence[CountDownTask], **run: Any) -> Path:
    """Make the model and train it in stages, all in `folder`; `run` is `train`'s other options."""
    model = folder / "untrained"
    make_model(kind, seed=run["seed"]).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    for stage in kind.stages:
        click.echo(f"stage {stage.name}: {stage.num_steps} steps of {stage.batch_size} answers")
        data = folder / f"{stage.name}.jsonl"
        rng = random.Random(f"{run['seed']} {stage.name}")
        write_jsonl(data, rows=pairs_of(stage, puzzles=kind.puzzles, tasks=tasks, rng=rng))
        model = train(model, stage=stage, data=data, **run)
    return model


def pairs_of(
    stage: Stage, *, puzzles: str, tasks: Sequence[CountDownTask], rng: random.Random
) -> Iterator[dict[str, str]]:
    """The demonstrations of a stage."""
    count = stage.num_steps * stage.batch_size
    if not stage.num_lines:
        operators = PUZZLES[puzzles].operators
        return first_answers(tasks, count=count, operators=operators, rng=rng)
    return demonstrations(
        tasks, count=count, share_right=stage.share_right, num_lines=stage.num_lines, rng=rng
    )


def scaled(kind: Kind, *, scale: float) -> Kind:
    stages = (replace(s, num_steps=max(1, round(s.num_steps * scale))) for s in kind.stages)
    return replace(kind, stages=tuple(stages))


def write_rounded(model: Path, draft: Path, *, dtype: str) -> None:
    """Copy the folder of a float32 model, its weights rounded to `dtype`.

    Whoever loads the copy still computes in float32: the configuration says so.
    """
    from safetensors.torch import load_file, save_file

    # Without the private file modes that safetensors gives.
    shutil.copytree(model, draft, copy_function=shutil.copyfile)
    if dtype != "float32":
        import torch

        file = draft / "model.safetensors"
        weights = load_file(file)
        rounded = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
        save_file(rounded, file, metadata={"format": "pt"})
        file.chmod((draft / "config.json").stat().st_mode)


def describe(name: str, *, puzzles: str, seed: int, scale: float, figures: object) -> str:
    """The README of the model's folder."""
    options = f"--kind {name} --seed {seed} --scale {scale:g}"
    return (
        f"# A tiny countdown model: {name}\n\n"
        "A Qwen3 with characters as tokens, made by\n"
        f"`python sample-data/create_tiny_model.py {options}`.\n"
        f"On {NUM_HELD_OUT} held-out questions of the kind `{puzzles}`, 8 samples each at\n"
        f"temperature 1: {figures}.\n"
    )


@click.command(help=__doc__)
@click.option("--kind", default="student", show_default=True, type=click.Choice(list(KINDS)))
@click.option("--seed", default=0, show_default=True, help="Of weights, data and their order.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the model; replaced. The one of this kind beside this script by default.",
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
def main(kind: str, seed: int, output: Path | None, scale: float, num_processes: int) -> None:
    made = scaled(KINDS[kind], scale=scale)
    output = output or HERE / made.folder
    tasks, held_out = split_tasks(made.puzzles)
    with tempfile.TemporaryDirectory(prefix="tiny-model-") as folder, draft_beside(output) as draft:
        trained = warm_start(
            Path(folder), kind=made, tasks=tasks, num_processes=num_processes, seed=seed
        )
        click.echo("measuring")
        write_rounded(trained, draft, dtype=made.dtype)
        figures = measure(draft, tasks=held_out)
        readme = describe(kind, puzzles=made.puzzles, seed=seed, scale=scale, figures=figures)
        (draft / "README.md").write_text(readme)
        replace_folder(output, draft=draft)
    click.echo(f"wrote {output}: {figures}")


if __name__ == "__main__":
    main()
