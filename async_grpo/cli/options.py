"""Command lines made from option classes, so that help, validation and dumps cannot disagree."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from async_grpo.config.option import flag

Config = TypeVar("Config")
CONTEXT = {
    # The predecessor's underscores keep working: --batch_size is --batch-size.
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "show_default": True,
    "max_content_width": 100,
}


def options_of(config_class: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a click command one option for each field of `config_class`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        fields = sorted(dataclasses.fields(config_class), key=lambda field: not _is_required(field))
        for field in reversed(fields):
            function = _click_option(config_class, field)(function)
        return function

    return decorate


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of a running command's `options` that the user typed."""
    context = click.get_current_context()
    return {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING


def _click_option(config_class: type[Any], field: dataclasses.Field[Any]) -> Any:
    annotation = typing.get_type_hints(config_class)[field.name]
    is_required = _is_required(field)
    default: dict[str, Any] = {} if is_required else {"default": field.default}
    choices = field.metadata["choices"]
    if annotation is bool:
        name = flag(field.name)
        declaration = f"{name}/--no-{name[2:]}"
        return click.option(declaration, field.name, help=field.metadata["help"], **default)
    return click.option(
        flag(field.name),
        field.name,
        type=_Choice(choices) if choices else annotation,
        required=is_required,
        help=field.metadata["help"],
        **default,
    )


class _Choice(click.ParamType):
    """Like `click.Choice`, without its normalisation of underscores in values."""

    name = "choice"

    def __init__(self, choices: tuple[str, ...]) -> None:
        self.choices = choices

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "[" + "|".join(filter(None, self.choices)) + "]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            known = ", ".join(filter(None, self.choices))
            self.fail(f"{value!r} is not one of {known}", param, ctx)
        return str(value)
