"""Command lines made from option classes, so that help, validation and dumps cannot disagree."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from async_grpo.config.option import flag, groups_of

Config = TypeVar("Config")
CONTEXT = {
    # The predecessor's underscores keep working: --batch_size is --batch-size.
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "show_default": True,
    "max_content_width": 100,
}


class GroupedCommand(click.Command):
    """A command whose `--help` shows its options under the headings that they declare."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                group = getattr(parameter, "group", "") or "Other options"
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


class GroupedOption(click.Option):
    """An option of a config class."""

    def __init__(self, *arguments: Any, group: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group


def options_of(config_class: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a click command one option for each field of `config_class`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        fields = {field.name: field for field in dataclasses.fields(config_class)}
        for name, group in reversed(groups_of(config_class).items()):
            function = _click_option(config_class, fields[name], group)(function)
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


def _click_option(config_class: type[Any], field: dataclasses.Field[Any], group: str) -> Any:
    annotation = typing.get_type_hints(config_class)[field.name]
    is_required = field.default is dataclasses.MISSING
    settings = {"cls": GroupedOption, "group": group, "help": field.metadata["help"]}
    if not is_required:
        settings["default"] = field.default
    choices = field.metadata["choices"]
    if annotation is bool:
        name = flag(field.name)
        return click.option(f"{name}/--no-{name[2:]}", field.name, **settings)
    return click.option(
        flag(field.name),
        field.name,
        type=_Choice(choices) if choices else annotation,
        required=is_required,
        **settings,
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
