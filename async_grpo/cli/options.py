"""Command lines made from option classes, so that help, validation and dumps cannot disagree."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import click

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
        for field in reversed(dataclasses.fields(config_class)):
            function = _click_option(config_class, field)(function)
        return function

    return decorate


def _click_option(config_class: type[Any], field: dataclasses.Field[Any]) -> Any:
    annotation = typing.get_type_hints(config_class)[field.name]
    is_required = field.default is dataclasses.MISSING
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
        return "[" + "|".join(self.choices) + "]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            self.fail(f"{value!r} is not one of {', '.join(self.choices)}", param, ctx)
        return str(value)
