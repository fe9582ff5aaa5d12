"""The options of evaluation: sets of held-out questions, each with its own sampling and rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_grpo.config.data_files import (
    BETWEEN_FILES,
    DataSource,
    Entry,
    parse_entry,
)
from async_grpo.config.option import Change, Options, Several, option, require
from async_grpo.util.errors import ConfigError

SAMPLES_PER_QUESTION = 4
UNNAMED = ""  # the set of --eval-data-path, and of the held-out file of each type
KEYS = (
    "samples", "k", "temperature", "top_p", "max_tokens", "rewards", "environment", "every",
    "limit", "seed", "type", "split", "config", "columns",
)  # fmt: skip
NUMBERS: dict[str, type[int] | type[float]] = {
    "samples": int, "k": int, "temperature": float, "top_p": float, "max_tokens": int,
    "every": int, "limit": int, "seed": int,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A set of held-out questions and how it is sampled; defaults are those of training."""

    name: str
    source: DataSource | None = None  # None: as `--eval-data-path` and `--data` say
    samples: int = SAMPLES_PER_QUESTION  # of each question: n of pass@k
    ks: tuple[int, ...] = ()  # of pass@k; none: 1 and `samples`
    temperature: float | None = None
    top_p: float = 1.0
    max_tokens: int | None = None  # longest output
    rewards: tuple[str, ...] = ()  # none: those of a question's type
    environment: str = ""  # empty: that of a question's type
    every: int | None = None  # batches between evaluations; None: --eval-every-batches
    limit: int = 0  # questions, from the first on; 0: all
    seed: int = 0  # of the samples, and of the intervals
    type: str = ""  # of all its questions, one of --data; empty: each line names its own
    columns: Mapping[str, str] = field(default_factory=dict)  # our names to the file's
    text: str = field(default="", compare=False)  # as --eval has it

    @property
    def pass_ks(self) -> tuple[int, ...]:
        """The k of every pass@k that is reported."""
        return self.ks or tuple(sorted({1, self.samples}))


def evaluation_set(text: str, *, named: Callable[[str], str] | None = None) -> EvaluationSet:
    """Parse one value of `--eval`; raises `ConfigError`, with `named` giving the field's name.

    >>> found = evaluation_set("math=m.jsonl,samples=8,k=1+8,temperature=0.6")
    >>> found.name, found.source.path, found.samples, found.ks, found.temperature
    ('math', 'm.jsonl', 8, (1, 8), 0.6)
    """
    example = "math=math.jsonl,samples=8"
    entry = parse_entry(text, option_name="eval", keys=KEYS, what="name", example=example)
    given = entry.given
    numbers = {
        key: _number(entry, key, given[key]) for key in NUMBERS if key in given and key != "k"
    }
    ks = {int(_number(entry, "k", part)) for part in entry.listed("k")}
    found = EvaluationSet(
        name=entry.name,
        source=entry.source,
        ks=tuple(sorted(ks)),
        rewards=entry.listed("rewards"),
        environment=given.get("environment", ""),
        type=given.get("type", ""),
        columns=entry.columns,
        text=text,
        **numbers,
    )
    check_set(found, named=named or f"--eval of {entry.name}: {{}}".format)
    return found


def check_set(found: EvaluationSet, *, named: Callable[[str], str]) -> None:
    """Raise `ConfigError` for illegal numbers; `named` gives the name of a field for users.

    >>> check_set(EvaluationSet(name="math", top_p=2.0), named="its {}".format)
    Traceback (most recent call last):
    async_grpo.util.errors.ConfigError: its top_p must be above 0 and at most 1, got 2.0: 1 is all
    """
    samples, temperature, tokens = found.samples, found.temperature, found.max_tokens
    rules = (
        (samples >= 1, "samples", "must be at least 1", "4 is usual"),
        (
            all(1 <= k <= samples for k in found.ks), "ks",
            f"must be from 1 to the samples of a question ({samples})", "sample more, or lower k",
        ),
        (0 < found.top_p <= 1, "top_p", "must be above 0 and at most 1", "1 is all"),
        (
            temperature is None or temperature >= 0, "temperature", "must not be negative",
            "0 takes the likeliest token",
        ),
        (
            temperature != 0 or samples == 1, "samples",
            "must be 1 at temperature 0, where every output is the same", "raise the temperature",
        ),
        (tokens is None or tokens >= 1, "max_tokens", "must be positive", "512 is usual"),
        ((found.every or 0) >= 0, "every", "must not be negative", "0: first and last only"),
        (found.limit >= 0, "limit", "must not be negative", "0: all questions"),
        (0 <= found.seed < 2**31, "seed", "must be below 2**31 and not negative", "0 is usual"),
    )  # fmt: skip
    for holds, name, rule, remedy in rules:
        if not holds:
            where, value = named("k" if name == "ks" else name), getattr(found, name)
            raise ConfigError(f"{where} {rule}, got {value!r}: {remedy}")


def check_best(name: str, sets: Sequence[EvaluationSet]) -> EvaluationSet:
    """The set whose metric `name` is; raises `ConfigError` where no set has it.

    >>> check_best("eval_pass_at_4/math", [EvaluationSet(name="math")]).name
    'math'
    """
    variables = {
        f"eval_{what}/{found.name}".removesuffix("/"): found
        for found in sets
        for what in ("accuracy", "reward", "solved", *(f"pass_at_{k}" for k in found.pass_ks))
    }
    known = f"choose from {', '.join(variables)}" if variables else "add --eval-data-path or --eval"
    rule = "must be a figure of an evaluation of which more is better"
    require(name in variables, "keep_best_checkpoint", rule, name, known)
    return variables[name]


def _number(entry: Entry, key: str, text: str) -> Any:
    kind = NUMBERS[key]
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(
            f"--eval of {entry.name}: {key} must be {what}, got {text!r}: write {key}=1"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions(Options):
    """The options of held-out data, and of when it is evaluated."""

    eval_data_path: str = option("", none="")
    """held-out data, graded (sft: its loss) before, during and after training; more: --eval"""
    eval_every_batches: int = option(0, group="Evaluation")
    """batches between evaluations; 0: only first and last"""
    eval_data_split: str = option("")
    """split of --eval-data-path; empty: --data-split"""
    eval_data_config: str = option("")
    """configuration of --eval-data-path; empty: --data-config if both are the same source"""
    eval: tuple[EvaluationSet, ...] = option((), several=Several(BETWEEN_FILES, evaluation_set))
    """NAME=PATH,key=value,...: another set of held-out questions; give it once for each. Keys:
    samples of each question (4), k of pass@k (1+4), temperature, top_p, max_tokens, rewards (names
    with + between), environment, every (batches), limit (questions), seed, type, split, config,
    columns (types), and names of columns as input=question"""

    keep_best_checkpoint: str = option("", none="", change=Change.INCIDENTAL)
    """what the best checkpoint is told by, a variable of evaluations such as eval_pass_at_4 or
    eval_accuracy/NAME: it stays beside --keep-checkpoints, and each batch evaluated is saved"""

    def check(self) -> None:
        """See `Options`."""
        names = [each.name for each in self.eval]
        for name in names:
            rule = "must have one entry for each set"
            require(names.count(name) == 1, "eval", rule, name, "give each name once")
