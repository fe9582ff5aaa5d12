"""How an option is declared: a typed dataclass field, and below it a string that is its help.

Python parses such strings and does not keep them; metrics are explained by them too.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Flag, auto
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Any, get_type_hints

from async_grpo.util.errors import ConfigError

USUAL_GROUP = "Usual options"
QUOTED = r"""'[^']*'|"[^"]*\""""  # where no separator is one
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# What a number may have to be, and what to give else.
NOT_NEGATIVE, POSITIVE, AT_LEAST_1 = "not be negative", "be positive", "be at least 1"
BOUNDS: dict[str, tuple[Callable[[float, float], bool], int, str]] = {
    NOT_NEGATIVE: (operator.ge, 0, "give 0 or more"),
    POSITIVE: (operator.gt, 0, "give a positive number"),
    AT_LEAST_1: (operator.ge, 1, "give a positive number"),
}


class Change(Flag):
    """What happens when a resumed run gives an option another value than before."""

    RECORDED = 0
    FIXED = auto()  # refused: the option defines what a step contains, or which weights score
    PLACE = auto()  # allowed: the option names where a run reads and writes
    INCIDENTAL = auto()  # ignored where a run replaces one that has no checkpoint
    LIVE = auto()  # can be set while a run trains: see `with_settings` of `config.train_config`


@dataclass(frozen=True, slots=True)
class Several:
    """Declares an option that may be repeated: its value is a tuple of records.

    `training_params.json` stores them as one string, joined by `between`.
    """

    between: str
    record: Callable[[str], object] = str.strip  # parses one record, which keeps or is its text

    def records(self, given: str | Iterable[object]) -> tuple[object, ...]:
        """Parse one string that holds all records, several strings, or records themselves.

        >>> Several(",").records(["a, b", "c"])
        ('a', 'b', 'c')
        """
        listed = [given] if isinstance(given, str) else given
        return tuple(record for each in listed for record in self._records_in(each))

    def _records_in(self, given: object) -> Iterable[object]:
        if not isinstance(given, str):
            return [given]
        return [self.record(text) for text in split_text(given, self.between) if text.strip()]

    def text(self, records: Iterable[object]) -> str:
        """Join the texts of all records into one string."""
        return self.between.join(str(getattr(each, "text", each)) for each in records)


def split_text(text: str, between: str) -> list[str]:
    """Split a string at separators outside quotes and parentheses.

    >>> split_text("a=b,environment=agent:python agent.py '1,2',c=d", ",")
    ['a=b', "environment=agent:python agent.py '1,2'", 'c=d']
    """
    return re.findall(rf"(?:\((?:{QUOTED}|[^()'\"])*\)|{QUOTED}|[^{between}])+", text)


def option(
    default: object,
    *,
    must: str = NOT_NEGATIVE,
    change: Change = Change.RECORDED,
    choices: Sequence[str] = (),
    none: object = None,
    aliases: Sequence[str] = (),
    several: Several | None = None,
    group: str = "",
    bare: str | None = None,
) -> Any:
    """A dataclass field for one option, whose help stands below it; `choices` are its legal values.

    `must`: one of `BOUNDS`, which a number has to satisfy; empty: no bound. `change`: what a new
    value means to a resumed run; by default it is recorded. `none`: the value that a typed None
    stands for; without it None is refused. `aliases`: other names on the command line. `several`:
    the option may be repeated. `group`: the `--help` heading of this option and of those that
    follow it in its class. `bare`: the value where the name is typed alone, as for a former switch,
    whose True and False then mean this and `none`.
    """
    metadata = {"must": must, "change": change, "choices": choices, "none": none}
    metadata |= {"aliases": aliases, "several": several, "group": group, "bare": bare}
    return field(default=default, metadata=metadata)


def required(*, group: str = "") -> Any:
    """A dataclass field for an option without a default, which names a path or an address."""
    return option(MISSING, change=Change.PLACE, group=group)


def parts_of(config_class: type[Any]) -> dict[str, type[Any]]:
    """{attribute: class} of the parts of a composed class of options; without parts, itself."""
    types = get_type_hints(config_class).items()
    parts = {
        name: each for name, each in types if isinstance(each, type) and issubclass(each, Options)
    }
    return parts or {"": config_class}


def option_fields(config_class: type[Any]) -> dict[str, Field[Any]]:
    """{option: its field}, part by part."""
    return {each.name: each for part in parts_of(config_class).values() for each in fields(part)}


@cache
def option_types(config_class: type[Any]) -> Mapping[str, type[Any]]:
    """{option: type of its value}."""
    hints: dict[str, type[Any]] = {}
    for part in parts_of(config_class).values():
        hints |= get_type_hints(part)
    return hints


def option_docs(config_class: type[Any]) -> dict[str, str]:
    """{option: its help}."""
    docs: dict[str, str] = {}
    for part in parts_of(config_class).values():
        docs |= attribute_docs(part)
    return docs


def options_of_change(config_class: type[Any], change: Change) -> tuple[str, ...]:
    """Names of the options declared with this `Change`."""
    known = option_fields(config_class).items()
    return tuple(name for name, each in known if change in each.metadata["change"])


def groups_of(config_class: type[Any]) -> dict[str, str]:
    """{option: heading} in the order of `--help`.

    `USUAL` options come first, then each part's, a class's own before the inherited ones.
    """
    groups = dict.fromkeys(getattr(config_class, "USUAL", ()), USUAL_GROUP)
    known = option_fields(config_class)
    for part in parts_of(config_class).values():
        group = ""
        for name in (name for owner in part.__mro__ for name in inspect.get_annotations(owner)):
            group = known[name].metadata["group"] or group
            groups.setdefault(name, group)
    return groups


def flag(name: str) -> str:
    """The option's spelling on the command line.

    >>> flag("batch_size")
    '--batch-size'
    """
    return "--" + name.replace("_", "-")


def names_in(text: str) -> tuple[str, ...]:
    """Split the value of an option that takes comma-separated names.

    >>> names_in("countdown, my.py:near(by=2, to=['a, b']),")
    ('countdown', "my.py:near(by=2, to=['a, b'])")
    """
    return tuple(name.strip() for name in split_text(text, ",") if name.strip())


def require(condition: bool, name: str, rule: str, value: object, remedy: str) -> None:
    """Raise `ConfigError` naming the option, the rule it breaks, its value and the remedy."""
    if not condition:
        raise ConfigError(f"{flag(name)} {rule}, got {value!r}: {remedy}")


class Options:
    """Base of the option dataclasses, whose fields `option` makes."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            if several := each.metadata["several"]:
                records = several.records(getattr(self, each.name))
                object.__setattr__(self, each.name, records)
        self.check_numbers()
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other; subclasses override this."""

    def check_numbers(self) -> None:
        """Raise `ConfigError` for a number outside its bound."""
        for each in fields(self):  # type: ignore[arg-type]
            value, must = getattr(self, each.name), each.metadata["must"]
            if not must or not isinstance(value, int | float):
                continue
            holds, bound, remedy = BOUNDS[must]
            if not holds(value, bound):
                raise self.refusal(each.name, f"must {must}", remedy)

    def options(self) -> dict[str, Any]:
        """{option: value}, with repeated options joined to one string."""
        found = {}
        for each in fields(self):  # type: ignore[arg-type]
            value, several = getattr(self, each.name), each.metadata["several"]
            found[each.name] = several.text(value) if several else value
        return found

    def refusal(self, name: str, rule: str, remedy: str) -> ConfigError:
        """The error of an option that breaks a rule."""
        return ConfigError(f"{flag(name)} {rule}, got {self.options()[name]!r}: {remedy}")


def attribute_docs(owner: type) -> dict[str, str]:
    """{attribute: string below it} of a class and its base classes."""
    docs: dict[str, str] = {}
    for each in reversed(owner.__mro__[:-1]):  # all but `object`
        [tree] = ast.parse(dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for pair in pairwise(tree.body):
            match pair:
                case (
                    ast.Assign(targets=[name]) | ast.AnnAssign(target=name),
                    ast.Expr(ast.Constant(str(text))),
                ):
                    docs[ast.unparse(name)] = " ".join(text.split())
    return docs
