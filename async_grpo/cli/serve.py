"""`async-grpo serve`: a model behind OpenAI's protocol."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT, OptionsCommand, options_of
from async_grpo.config.command_options import ServeConfig
from async_grpo.launch import interrupts
from async_grpo.model.hub import local_folder
from async_grpo.model.model_folder import check_files, check_tokenizer_files


@click.command("serve", cls=OptionsCommand, context_settings=CONTEXT)
@click.argument("model")
@options_of(ServeConfig)
@command_boundary()
def main(model: str, **options: Any) -> None:
    """Serve MODEL, a folder or a name on a hub, to clients of OpenAI's protocol.

    Chats, completions and vLLM's token ids; a path /s/NAME keeps one conversation. It needs neither
    Ray nor workers. The token is that of ASYNC_GRPO_TOKEN, or is made and printed.

    \b
    e.g. runs/mine/hf_format/samples_1000 --port 8001
    """
    config = ServeConfig(**options)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    logging.getLogger("async_grpo").setLevel(config.logging_level)
    interrupts.interrupt_once()
    folder = local_folder(model, revision=config.model_revision)
    check_files(Path(folder))
    check_tokenizer_files(Path(folder))
    from async_grpo.gateway.serving import serve  # seconds, as all that needs torch

    serve(folder, config, name=model, say=click.echo)
