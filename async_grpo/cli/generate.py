"""`async-grpo generate`: a teacher's own outputs as training pairs."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT, OptionsCommand, options_of
from async_grpo.config.command_options import GenerateConfig
from async_grpo.data.columns import Columns, parse_column_mapping
from async_grpo.data.lines import check_source
from async_grpo.launch import interrupts
from async_grpo.model.hub import local_folder
from async_grpo.model.model_folder import check_files, check_tokenizer_files


@click.command("generate", cls=OptionsCommand, context_settings=CONTEXT)
@options_of(GenerateConfig)
@command_boundary()
def main(**options: Any) -> None:
    """Write a teacher's own outputs as pairs to train on.

    The pairs are the lines of the questions, each with an output as its completion. It needs
    neither Ray nor workers. --reward-fns leaves bad outputs out.

    \b
    e.g. --model-path models/large --data-path questions.jsonl --output pairs.jsonl
    """
    config = GenerateConfig(**options)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    logging.getLogger("async_grpo").setLevel(config.logging_level)
    interrupts.interrupt_once()
    folder = local_folder(config.model_path, revision=config.model_revision)
    config = replace(config, model_path=folder)
    _check_at_once(config)
    from async_grpo.run.written_pairs import generate_pairs  # seconds, as all that needs torch

    count = generate_pairs(config, say=lambda sentence: click.echo(sentence, err=True))
    click.echo(f"wrote {config.output}: {count.in_words()}")


def _check_at_once(config: GenerateConfig) -> None:
    """What can be seen before torch is imported."""
    check_files(Path(config.model_path))
    check_tokenizer_files(Path(config.model_path))
    mapping = parse_column_mapping(config.column_mapping)
    check_source(
        config.data_path, option="--data-path", build=lambda row: Columns(row, mapping=mapping)
    )
    folder = Path(config.output).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(config.output).is_dir():
        raise config.refusal(
            "output", "must be a file in a folder that can be written", "name another"
        )
