"""Options from command lines, made from option classes, and from the launcher's environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from async_grpo.cli.run_file import same_here, table_of, told_of
from async_grpo.config.option import flag, groups_of, option_docs, option_fields, option_types
from async_grpo.util.errors import ConfigError

NOT_BUILT = ("tensor", "pipeline", "context")  # ways to divide a model among ranks

Function = Callable[..., object]  # which click makes a command of
CONTEXT = {
    # The predecessor's underscores keep working: --batch_size is --batch-size.
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "show_default": True,
    "max_content_width": 100,
}

# Variables of accelerate's launcher, which writes its defaults too: what each sets here, and the
# option's value for each of its own, in lower case, its default first.
OF_ACCELERATE: dict[str, tuple[str, dict[str, object]]] = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", {"no": "no", "bf16": "bf16"}),
    "ACCELERATE_DYNAMO_BACKEND": ("use_torch_compile", {"no": False, "inductor": True}),
    "FSDP_OFFLOAD_PARAMS": ("offload", {"false": "none", "true": "parameters"}),
    "FSDP_ACTIVATION_CHECKPOINTING": ("activation_checkpointing", {"false": "off", "true": "on"}),
}
# The strategy, by FSDP_VERSION: FSDP1's enumeration counts from 1.
STRATEGIES: dict[str, tuple[str, dict[str, object]]] = {
    "1": ("FSDP_SHARDING_STRATEGY", {
        "full_shard": "FULL_SHARD", "1": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP",
        "2": "SHARD_GRAD_OP", "no_shard": "NO_SHARD", "3": "NO_SHARD",
        "hybrid_shard": "HYBRID_SHARD", "4": "HYBRID_SHARD",
    }),
    "2": ("FSDP_RESHARD_AFTER_FORWARD", {"true": "FULL_SHARD", "false": "SHARD_GRAD_OP"}),
}  # fmt: skip
# What else would change a run: the values that are as it is done here, and what to give else.
ONLY_OF_ACCELERATE: dict[str, tuple[tuple[str, ...], str]] = {
    "ACCELERATE_USE_DEEPSPEED": (("false",), "give --use_fsdp: ZeRO-1 is ZERO1, ZeRO-3 FULL_SHARD"),
    "ACCELERATE_USE_MEGATRON_LM": (("false",), "give --use_fsdp"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        ("false",), "give --fsdp-sharding-strategy HYBRID_SHARD and --fsdp-shard-ranks here"),
    "ACCELERATE_CPU_AFFINITY": (("0",), "leave it out, and start accelerate under numactl"),
    "ACCELERATE_DYNAMO_MODE": (("default",), "leave it out"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": (("false",), "leave it out, rows differ in length"),
    "FSDP_AUTO_WRAP_POLICY": (
        ("transformer_based_wrap",), "give that: decoder layers are the units here"),
    "FSDP_STATE_DICT_TYPE": (
        ("sharded_state_dict",), "give that, only exports in hf_format are whole"),
    "FSDP_BACKWARD_PREFETCH": (("backward_pre", "1"), "give that, which is what FSDP2 does"),
    "FSDP_FORWARD_PREFETCH": (("false",), "leave it out, FSDP2 has its own order"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (("false",), "leave it out"),
    "FSDP_IGNORED_MODULES": ((), "leave it out, all parameters are sharded"),
}  # fmt: skip


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
            typed, rest, _ = self.make_parser(ctx).parse_args(list(args))
        except click.NoSuchOption as error:
            self._tell_ours(error.option_name, ctx)
            raise
        for word in rest:  # as verl has them: actor_rollout_ref.rollout.n=8
            self._tell_ours(word.partition("=")[0] if "=" in word else "", ctx)
        if isinstance(file := typed.get("config"), str) and not ctx.resilient_parsing:
            values = table_of(file, command=self, mode=typed.get("mode"), number=typed.get("table"))
            ctx.default_map = {**values, **(ctx.default_map or {})}
        return super().parse_args(ctx, args)

    def _tell_ours(self, name: str, ctx: click.Context) -> None:
        """Raise `click.UsageError` for an option of TRL's or verl's that is not spelled so here."""
        own = same_here(name)
        if own is not None:
            is_here = own in (param.name for param in self.params)
            near = f"Did you mean '{flag(own)}'?" if is_here else told_of(own)
            raise click.UsageError(f"No such option '{name}'. {near[0].upper()}{near[1:]}", ctx)

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


def options_of_launcher(
    environ: Mapping[str, str], given: Mapping[str, object]
) -> dict[str, object]:
    """The options that `accelerate launch` sets, beside those given here; without it none.

    A given option precedes a default of the launcher, and may not contradict anything else. Raises
    `ConfigError` for that, for what means nothing here, and for one process in place of several.

    >>> options_of_launcher({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"batch_size": 8})
    {'mixed_precision': 'bf16'}
    """
    if "ACCELERATE_MIXED_PRECISION" not in environ:
        return {}
    _refuse_single_process(environ)
    _refuse_foreign_keys(environ)
    version = environ.get("FSDP_VERSION", "1")
    if version not in STRATEGIES:
        raise _unlike("FSDP_VERSION", version, STRATEGIES, "give 2")
    strategy, meanings = STRATEGIES[version]
    kept = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true")
    if version == "1" and kept.lower() not in ("true", environ.get(strategy, "").lower()):
        remedy = "give fsdp_sharding_strategy, with FSDP1 accelerate reads no other"
        raise _unlike("FSDP_RESHARD_AFTER_FORWARD", kept, (), remedy)
    found: dict[str, object] = {}
    table = {**OF_ACCELERATE, strategy: ("fsdp_sharding_strategy", meanings)}
    for name, (option, values) in table.items():
        if name in environ:
            found |= _meant(name, environ[name], option, values, given)
    return found


def _refuse_single_process(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` where only this process was started, with the address of several."""
    if "RANK" not in environ and {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= environ.keys():
        raise ConfigError(
            "accelerate launch must start a process for each of its num_processes, but without "
            "--use_fsdp or --multi_gpu it has started a single one: give --use_fsdp, or "
            "--num_processes 1 there and --nproc-per-node here"
        )


def _refuse_foreign_keys(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for what accelerate is asked for and does not exist here."""
    for name, (values, remedy) in ONLY_OF_ACCELERATE.items():
        if environ.get(name, "").lower() not in ("", *values):
            raise _unlike(name, environ[name], values, remedy)
    for name in filter(None, environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",")):
        if not name.strip().endswith(("DecoderLayer", "Block")):
            remedy = "leave it out, decoder layers are the units here"
            raise _unlike("FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP", name, (), remedy)


def _meant(
    name: str, value: str, option: str, meanings: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, object]:
    """The option that one variable sets, unless it is given."""
    if value.lower() not in meanings:
        raise _unlike(name, value, meanings, f"give one of these, or {flag(option)} here")
    meant = meanings[value.lower()]
    if option not in given:
        return {option: meant}
    if given[option] != meant and meant != next(iter(meanings.values())):
        remedy = f"leave it out, or {flag(option)} {given[option]}"
        raise _unlike(name, value, (str(given[option]),), remedy)
    return {}


def _unlike(name: str, value: str, values: Iterable[str], remedy: str) -> ConfigError:
    key, known = name.removeprefix("ACCELERATE_").lower(), " or ".join(values)
    rule = f"be {known}" if known else "not be set"
    return ConfigError(f"accelerate's {key} must {rule}, got {value}: {remedy}")


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
