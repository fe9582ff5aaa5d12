"""Command lines made from option classes, so that help, validation and dumps cannot disagree."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from async_grpo.cli.run_file import OF_TRL, table_of
from async_grpo.config.option import flag, groups_of, option_docs, option_fields, option_types

NOT_BUILT = ("tensor", "pipeline", "context")  # ways to divide a model among ranks

Function = Callable[..., object]  # which click makes a command of
CONTEXT = {
    # The predecessor's underscores keep working: --batch_size is --batch-size.
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "show_default": True,
    "max_content_width": 100,
}


class OptionsCommand(click.Command):
    """A command whose `--help` shows its options under the headings that they declare.

    Its switches also take a value, as scripts write it: `--deterministic True`. What its table in
    the file of `--config` says is its default.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = [param for param in self.params if isinstance(param, click.Option)]
        switches = {option.opts[0]: option.secondary_opts[0] for option in options
                    if option.is_bool_flag and option.secondary_opts}  # fmt: skip
        args = list(without_truth_values(args, switches=switches))
        try:
            typed = self.make_parser(ctx).parse_args(list(args))[0]
        except click.NoSuchOption as error:
            if own := OF_TRL.get(error.option_name.strip("-").replace("-", "_")):
                near = f"No such option '{error.option_name}'. Did you mean '{flag(own)}'?"
                raise click.UsageError(near, ctx) from None
            raise
        if isinstance(file := typed.get("config"), str) and not ctx.resilient_parsing:
            values = table_of(file, command=self, mode=typed.get("mode"), number=typed.get("table"))
            ctx.default_map = {**values, **(ctx.default_map or {})}
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                group = getattr(parameter, "group", "") or "Other options"
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group if len(groups) > 1 else "Options"):
                formatter.write_dl(records)


class GroupedOption(click.Option):
    """An option of a config class."""

    def __init__(self, *arguments: Any, group: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group


def without_truth_values(args: Sequence[str], *, switches: Mapping[str, str]) -> Iterator[str]:
    """The arguments with `--x True` as `--x` and `--x False` as `--no-x`; `switches` has both.

    >>> list(without_truth_values(["--a", "True", "--a=false", "--b", "True"],
    ...                           switches={"--a": "--no-a"}))
    ['--a', '--no-a', '--b', 'True']
    """
    rest = list(args)
    while rest:
        name, is_joined, value = rest.pop(0).partition("=")
        opposite = switches.get(name.replace("_", "-"))
        if opposite and not is_joined and rest and rest[0].lower() in ("true", "false"):
            is_joined, value = "=", rest.pop(0)
        if opposite and value.lower() in ("true", "false"):
            yield name if value.lower() == "true" else opposite
        else:
            yield name + is_joined + value


def options_of(config_class: type[Any]) -> Callable[[Function], Function]:
    """A decorator that gives a click command one option for each field of `config_class`."""

    def decorate(function: Function) -> Function:
        fields, docs = option_fields(config_class), option_docs(config_class)
        for name, group in reversed(groups_of(config_class).items()):
            settings = {"cls": GroupedOption, "group": group, "help": docs[name]}
            function = _click_option(config_class, fields[name], settings)(function)
        return function

    return decorate


def given_options(context: click.Context) -> dict[str, object]:
    """The options of a command that the user typed, or wrote into the run's file."""
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }


def is_typed(context: click.Context, name: str) -> bool:
    """Whether the user typed an option on the command line."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _click_option(
    config_class: type, field: dataclasses.Field[object], settings: dict[str, Any]
) -> Callable[[Function], Function]:
    annotation = option_types(config_class)[field.name]
    is_required = field.default is dataclasses.MISSING
    if not is_required:
        settings["default"] = field.default
    choices = field.metadata["choices"]
    if field.metadata["several"]:
        annotation, settings["multiple"] = str, True
    if annotation is bool:
        name = flag(field.name)
        return click.option(f"{name}/--no-{name[2:]}", field.name, **settings)
    off, bare = field.metadata["none"], field.metadata["bare"]
    once = {"true": bare, "false": off} if bare else {}
    if bare:
        settings |= {"is_flag": False, "flag_value": bare}
    parsed_as = _Choice(choices, once) if choices else click.types.convert_type(annotation)
    if off is not None:
        parsed_as = _OrNone(parsed_as, off)
    return click.option(
        *map(flag, (field.name, *field.metadata["aliases"])),
        field.name,
        type=parsed_as,
        required=is_required,
        **settings,
    )


class _OrNone(click.ParamType):
    """A click type that returns `off` for the text None, and else what another type does."""

    def __init__(self, parsed_as: click.ParamType, off: object) -> None:
        self.name = parsed_as.name
        self.parsed_as = parsed_as
        self._off = off

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return self.parsed_as.shell_complete(ctx, param, incomplete)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._off if value == "None" else self.parsed_as.convert(value, param, ctx)


class _Choice(click.ParamType):
    """A case-insensitive `click.Choice` that does not normalise underscores in values."""

    name = "choice"

    def __init__(self, choices: tuple[str, ...], once: Mapping[str, str]) -> None:
        """`once`: {another word, in lower case: choice}.

        If a choice has a colon, any text with a colon is taken: it names a user's class.
        """
        self.choices = choices
        self._once = once

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        found = [choice for choice in self.choices if choice.startswith(incomplete)]
        return [CompletionItem(choice) for choice in found if choice and ":" not in choice]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "[" + "|".join(filter(None, self.choices)) + "]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        words = {choice.casefold(): choice for choice in self.choices} | dict(self._once)
        found = words.get(str(value).casefold())
        if found is None and ":" in str(value) and any(":" in choice for choice in self.choices):
            return str(value)
        if found is None:
            known = ", ".join(filter(None, self.choices))
            self.fail(f"{value!r} is not one of {known}", param, ctx)
        return found


def predecessor_options(function: Function) -> Function:
    """A decorator that gives a click command options of the predecessor that do nothing here.

    Values without effect are accepted, others refused. All of them are hidden from --help.
    """
    refused = (
        ("--experience-batcher-name", str, None),  # it told runs apart, as --namespace does
        ("--global-rank", int, _check_rank),
        ("--insert-reasoning-phrases/--no-insert-reasoning-phrases", bool, _refuse_phrases),
        *((f"--{way}-parallel-size", int, _refuse_parallel) for way in NOT_BUILT),
    )
    for name, kind, check in refused:
        hidden = click.option(name, type=kind, hidden=True, expose_value=False, callback=check)
        function = hidden(function)
    return function


def _check_rank(_context: click.Context, _option: click.Parameter, rank: int | None) -> None:
    own = int(os.environ.get("RANK", "0"))
    if rank is not None and rank != own:
        raise click.UsageError(
            f"--global-rank must be the rank that torchrun gave this process ({own}), got {rank}: "
            "leave it out"
        )


def _refuse_parallel(_context: click.Context, option: click.Parameter, size: int | None) -> None:
    if size not in (None, 1):
        raise click.UsageError(
            f"{option.opts[0]} must be 1 for a trainer, whose ranks divide a model by "
            f"--fsdp-sharding-strategy alone, got {size}: leave it out, and start as many ranks "
            "(engines take --tensor-parallel-size, as an option of worker_dispatcher.py)"
        )


def _refuse_phrases(_context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        raise click.UsageError(
            "--insert-reasoning-phrases must not be given, outputs are trained as the policy wrote "
            "them: leave it out, and put such phrases into the prompts"
        )
