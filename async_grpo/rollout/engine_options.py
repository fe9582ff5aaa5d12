"""Gives vLLM the options that a user wrote as KEY=VALUE, with vLLM's own types."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Mapping
from dataclasses import fields

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from async_grpo.config.engine_options import check_known
from async_grpo.util.errors import ConfigError


def set_engine_options(args: AsyncEngineArgs, options: Mapping[str, str]) -> None:
    """Set each on `args`, parsed as on vLLM's own command line.

    Raises `ConfigError` for a name that vLLM does not have, or a value that it does not take.
    """
    if not options:
        return
    check_known(options, {field.name for field in fields(args)})
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    for name, text in options.items():
        word = name.replace("_", "-")
        typed = {"true": f"--{word}", "false": f"--no-{word}"}.get(text.lower(), "")
        if f"--{word}" not in parser._option_string_actions:
            raise ConfigError(f"--engine-option {name} cannot be typed, got {text!r}: leave it out")
        if typed not in parser._option_string_actions:
            typed = f"--{word}={text}"
        try:
            value = getattr(parser.parse_args([typed]), name)
        except (ArgumentError, SystemExit) as error:
            raise ConfigError(
                f"--engine-option {name} must be as vLLM has it, got {text!r}: {error}"
            ) from None
        setattr(args, name, value)
