"""One line of the dump for the page: numbers for columns, texts and tokens for a block."""

from __future__ import annotations

import base64
import functools
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from async_grpo.config.roles import TEACHER
from async_grpo.types import token_weight
from async_grpo.viewing.page.dump import Key, Line

# {type code of Python's `array`: JavaScript's type}
TYPES = {"d": "Float64Array", "f": "Float32Array", "I": "Uint32Array", "H": "Uint16Array"}
NUMBERS = {
    "reward": "d", "format_reward": "d", "overlong_penalty": "d", "kl_penalty": "d",
    "advantage": "d", "weight": "d", "batch": "I", "step": "I", "ordinal": "I", "question": "I",
    "num_input_tokens": "I", "num_output_tokens": "I", "num_trained_tokens": "I", "round": "I",
    "rank": "I", "oldest": "I", "attempt": "H", "index": "H",
    "given": "H",
}  # fmt: skip
TRAINING = "training"  # among the names of sets
CATEGORIES = ("set", "fate", "dataset_type", "verdict", "finish_reason", "adapter")
Column = Any  # a value of a line: None, a list with a value a token, or such a list a row
NONE = 2**32 - 1  # in an unsigned column: unknown
MAX_HEAD = 200  # characters of a question that filters read and lists show


class Columns:
    """The numbers of all samples, one value each; a category's value is its number in `labels`."""

    def __init__(self) -> None:
        kinds = NUMBERS | dict.fromkeys(CATEGORIES, "H")
        self.values: dict[str, array[Any]] = {name: array(kind) for name, kind in kinds.items()}
        self.labels: dict[str, dict[str, int]] = {name: {} for name in CATEGORIES}
        self.heads: list[str] = []  # how each question begins
        self._questions: dict[int, int] = {}  # {hash of the whole text: its number}

    @property
    def num_samples(self) -> int:
        return len(self.values["batch"])

    def add(self, line: Line, place: Mapping[str, int], config: Line) -> None:
        """Append a sample; `place`: its step, and its round and rank if they are known."""
        known = {
            "set": TRAINING,
            "given": False,
            **line,
            **place,
            "question": self._question(str(line.get("input") or "")),
            "weight": weight_of(line, config),
            "oldest": min((int(v.rpartition(".")[2]) for v, *_ in spans(line)), default=None),
        }
        row = {name: _number(known.get(name), kind) for name, kind in NUMBERS.items()}
        for name, value in row.items():  # all or none: a line may hold anything
            self.values[name].append(value)
        for name in CATEGORIES:
            labels = self.labels[name]
            label = str(known.get(name) or "")
            self.values[name].append(labels.setdefault(label, len(labels)))

    def _question(self, text: str) -> int:
        number = self._questions.setdefault(hash(text), len(self.heads))
        if number == len(self.heads):
            self.heads.append(text[:MAX_HEAD])
        return number


def key_of(line: Line) -> Key:
    """Ordinal, attempt and index of the line's sample."""
    return line["ordinal"], line["attempt"], line["index"]


def spans(line: Line) -> list[list[Any]]:
    """[version, start, stop] of each span, of all rows."""
    found = line["weights_versions"]
    return [span for row in found for span in row] if _is_by_row(line) else found


def num_rows(line: Line) -> int:
    """How many sequences of the sample are trained."""
    return len(line["weights_versions"]) if _is_by_row(line) else 1


def _is_by_row(line: Line) -> bool:
    """Whether columns are lists of one value a row; 0.1.0 wrote a single row's value alone."""
    found = line["weights_versions"]
    return bool(found) and not (found[0] and isinstance(found[0][0], str))


def weight_of(line: Line, config: Line) -> float | None:
    """The weight of the sample's tokens in the loss, by the run's aggregation; None: unknown."""
    num_trained = line.get("num_trained_tokens")
    if num_trained is None or "aggregation" not in config:
        return None
    constant = config.get("constant_length_samples", 0)
    return token_weight(num_trained, config["aggregation"], constant)


def detail(
    line: Line, *, trained: Callable[[int], Line | None], words: Words | None
) -> dict[str, object]:
    """Texts and tokens of a sample.

    `trained` returns a rank's line of a row; `words` makes text of token ids, and is None where the
    dump has no ids.
    """
    kept = ("input", "answer", "output", "reason", "workers")
    found = {name: line.get(name) for name in kept} | {"spans": spans(line)}
    found |= {name: line[name] for name in ("turns", "given") if line.get(name)}
    if isinstance(line.get("advantage"), list):
        found["advantages"] = line["advantage"]
    if words is not None and "output_token_ids" in line:
        found["rows"] = [_row(line, number, trained(number), words) for number in
                         range(num_rows(line))]  # fmt: skip
    return found


def _row(line: Line, number: int, trained: Line | None, words: Words) -> dict[str, object]:
    def own(name: str) -> Column:
        return _of_row(line, number, line.get(name))

    mask = own("loss_mask")
    row = {
        "tokens": words(own("output_token_ids")),
        "mask": "".join("01"[bool(each)] for each in mask),
        "behaviour": _short(own("behaviour_logprobs")),
        "reference": _short(own("reference_logprobs")),
        "teacher": _short(_flat(_of_row(line, number, (line.get("scores") or {}).get(TEACHER)))),
        "versions": own("weights_versions"),
    }
    if trained is not None:
        terms = {name: _floats(trained.get(name)) for name in ("logprobs", "old", "gradients")}
        if len(terms["logprobs"] or ()) == row["mask"].count("1"):  # else of another run
            row |= terms
    return row


def _of_row(line: Line, number: int, values: Column) -> Column:
    return values[number] if values is not None and _is_by_row(line) else values


def _flat(values: Column) -> Column:
    """`values`, or None where a token has several values."""
    return None if values and isinstance(values[0], list) else values


def _short(values: Iterable[float | None] | None) -> list[float | None] | None:
    """Numbers of nine digits, which distinguish any two float32."""
    if values is None:
        return None
    return [None if each is None else float(f"{each:.9g}") for each in values]


def _floats(text: str | None) -> list[float | None] | None:
    """The numbers that `training.recorder.as_text` wrote as text."""
    if text is None:
        return None
    return _short(np.frombuffer(base64.b64decode(text), "<f4").tolist())


def _number(value: Any, kind: str) -> float | int:
    if isinstance(value, list):  # an advantage for each token
        numbers = [each for each in value if each is not None]
        value = math.fsum(numbers) / len(numbers) if numbers else None
    if kind in "df":
        return math.nan if value is None else float(value)
    most = NONE if kind == "I" else 2**16 - 1
    return most if value is None else min(int(value), most)


class Words:
    """Turns token ids into pieces of text, one for each id, whose concatenation is the text."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is one of transformers; None: ids are shown as numbers."""
        self._decode = functools.cache(lambda ids: tokenizer.decode(ids))
        self._has_text = tokenizer is not None
        self._piece = functools.cache(self._read)

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """A piece for each id; an id that is a part of a letter becomes the unknown letter."""
        if not self._has_text:
            return [f"⟨{each}⟩" for each in ids]
        return [self._piece(before, each) for before, each in zip([None, *ids], ids, strict=False)]

    def _read(self, before: int | None, each: int) -> str:
        """The text that `each` adds after `before`: some tokenizers drop a text's first space."""
        if before is None:
            return str(self._decode((each,)))
        pair, first = self._decode((before, each)), self._decode((before,))
        return str(pair.removeprefix(first) if pair.startswith(first) else self._decode((each,)))
