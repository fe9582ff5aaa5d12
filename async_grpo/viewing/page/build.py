"""Writes columns and blocks into the one file of a page, in one pass over the dump."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

from async_grpo.util.errors import DataError
from async_grpo.util.files import replacing
from async_grpo.viewing.page.cells import TYPES, Columns, Words, detail, key_of
from async_grpo.viewing.page.dump import Amount, Choice, Dump, Key, Line, TrainedTokens, choose

HERE = Path(__file__).parent
BLOCK_BYTES = 2**20  # of JSON in a block: what looking at a sample inflates
COMPRESSION = 6
CODE = (
    "weight.js", "math.js", "markdown.js", "provenance.js", "sample.js", "curves.js",
    "filters.js", "questions.js", "compare.js", "list.js", "follow.js",
    "page.js",
)  # fmt: skip
OPTIONS = (  # of the run: the page shows them and computes with them
    "algorithm", "advantage", "aggregation", "constant_length_samples", "ratio_level",
    "policy_loss", "clip_low", "clip_high", "dual_clip", "importance_correction",
    "correction_level", "correction_low", "correction_high", "kl_coefficient", "kl_estimator",
    "entropy_coefficient", "reward_coefficient", "opd_coefficient", "opd_clip", "gkd_coefficient",
    "max_grad_norm", "max_staleness",
)  # fmt: skip
OF_STEP = ("batch", "step", "num_samples", "num_tokens", "ratio_mode")
MEASURED = ("grad_norm", "learning_rate")
NOT_OURS = (KeyError, TypeError, ValueError, AttributeError, IndexError)  # another program's lines
FindTokenizer = Callable[[str], object]
Place = dict[str, int]  # step, round, rank


@dataclass(frozen=True, slots=True)
class Written:
    """What a page was made of."""

    found: Amount
    num_shown: int
    num_broken: int  # lines that are no samples
    size_bytes: int


def write_page(
    run: Path,
    output: Path,
    *,
    max_samples: int,
    max_mib: float,
    find_tokenizer: FindTokenizer,
) -> Written:
    """Write the samples of `run` as the page `output`, holding the columns and one block in memory.

    Of a dump with more than `max_samples` lines, or `max_mib` MiB, slots are left out evenly.
    `find_tokenizer` is called only where the dump has token ids, and may return None. Raises
    `DataError` where there is no dump, `OSError` where `output` cannot be written.
    """
    with closing(Dump(run)) as dump, tempfile.TemporaryFile() as file:
        amount = dump.amount()
        choice = choose(amount, max_samples=max_samples, max_bytes=max_mib * 2**20)
        blocks, columns = _Blocks(file), Columns()
        steps, places = steps_of(dump, choice)
        _read(dump, choice, columns, blocks, places, find_tokenizer)
        if not columns.num_samples:
            raise DataError(
                f"{dump.path} must hold samples, got no line that is one: {dump.problem}"
            )
        header = header_of(dump, columns, steps, amount.num_lines, blocks.starts)
        with replacing(output) as page:
            _assemble(page, header, columns, file)
    return Written(amount, columns.num_samples, dump.num_broken, output.stat().st_size)


def _read(
    dump: Dump,
    choice: Choice,
    columns: Columns,
    blocks: _Blocks,
    places: dict[Key, Place],
    find_tokenizer: FindTokenizer,
) -> None:
    """Fill columns and blocks."""
    words: Words | None = None
    with closing(TrainedTokens(dump, choice)) as trained:
        for line in dump.lines(choice):
            if words is None and "output_token_ids" in line:
                words = Words(find_tokenizer(str(dump.config.get("model_name_or_path", ""))))
            try:
                key, is_held_out = key_of(line), "set" in line
                content = detail(line, trained=partial(trained.of, key), words=words)
                place = {"step": step_of(line, dump.config)}
                place |= {} if is_held_out else places.get(key, {})
                columns.add(line, place, dump.config)
            except NOT_OURS as error:
                dump.broken(f"{type(error).__name__}: {error}")
            else:
                blocks.add(content)
    blocks.flush()


def header_of(
    dump: Dump, columns: Columns, steps: Sequence[Line], num_found: int, blocks: Sequence[int]
) -> Line:
    """What the page knows before it reads a sample; `blocks`: the number of each one's first."""
    return {
        "run": dump.name,
        "config": {name: dump.config[name] for name in OPTIONS if name in dump.config},
        "columns": [(name, TYPES[each.typecode]) for name, each in columns.values.items()],
        "labels": {name: list(labels) for name, labels in columns.labels.items()},
        "num_samples": columns.num_samples,
        "num_found": num_found,
        "num_broken": dump.num_broken,
        "blocks": blocks,
        "steps": steps,
        "alarms": list(dump.alarms()),
    }


def step_of(line: Line, config: Line) -> int:
    """The gradient step of the run, from 1, that trains the line's slot, first of all passes.

    >>> step_of({"batch": 2, "ordinal": 21}, {"batch_size": 8, "train_minibatch_size": 4})
    6
    >>> step_of({"batch": 2, "ordinal": 21}, {"batch_size": 8, "num_passes": 3})
    7
    >>> step_of({"batch": 2, "set": "math"}, {"batch_size": 8, "train_minibatch_size": 4})  # after
    4
    """
    size = config.get("batch_size") or 1
    per_step = config.get("train_minibatch_size") or size
    before = line["batch"] * (size // per_step) * (config.get("num_passes") or 1)
    if "set" in line:
        return int(before)
    within = (line["ordinal"] - line["batch"] * size) // per_step if per_step < size else 0
    return int(before + within + 1)


def steps_of(dump: Dump, choice: Choice) -> tuple[list[Line], dict[Key, Place]]:
    """The header's facts of each gradient step, and where the chosen samples were trained."""
    measured = dump.measured()
    steps: dict[int, Line] = {}
    places: dict[Key, Place] = {}
    for line in dump.steps():
        number = line["step"]
        own = {name: line.get(name) for name in OF_STEP}
        steps[number] = own | {name: measured.get(number, {}).get(name) for name in MEASURED}
        for round_index, ranks in enumerate(line["rounds"]):
            for rank, keys in enumerate(ranks):
                for ordinal, attempt, index, row in keys:
                    if row == 0 and choice.has(ordinal):
                        place = {"step": number, "round": round_index, "rank": rank}
                        places[ordinal, attempt, index] = place
    return list(steps.values()), places


class _Blocks:
    """Writes the texts of samples to a file, as gzip'd JSON lists of about `BLOCK_BYTES`."""

    def __init__(self, file: IO[bytes]) -> None:
        self.starts: list[int] = []  # of each block, the number of its first sample
        self._file = file
        self._waiting: list[bytes] = []
        self._num_bytes = 0
        self._num_samples = 0

    def add(self, content: dict[str, object]) -> None:
        self._waiting.append(as_json(content))
        self._num_bytes += len(self._waiting[-1])
        if self._num_bytes >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        content = b"[" + b",".join(self._waiting) + b"]"
        self._file.write(_script(f"block-{len(self.starts)}", content))
        self.starts.append(self._num_samples)
        self._num_samples += len(self._waiting)
        self._waiting, self._num_bytes = [], 0


def _assemble(page: BinaryIO, header: Line, columns: Columns, blocks: IO[bytes]) -> None:
    """Write numbers and code before the texts, so that a browser shows the page while it loads."""
    numbers = b"".join(values.tobytes() for values in columns.values.values())
    data = {"header": as_json(header), "columns": numbers, "questions": as_json(columns.heads)}
    start, end = skeleton(header["run"], data=data)
    page.write(start.encode())
    blocks.seek(0)
    shutil.copyfileobj(blocks, page)
    page.write(end.encode())


def skeleton(
    run: str, *, data: Mapping[str, bytes] | None = None, connect: str = "'none'"
) -> tuple[str, str]:
    """The page before its blocks, and after them; without `data`, it asks `connect` for it."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    code = "".join((HERE / name).read_text(encoding="utf-8") for name in CODE)
    filled = {
        "STYLE_HASH": _hash(style),
        "CODE_HASH": _hash(code),
        "CONNECT": connect,
        "STYLE": style,
        "DATA": b"".join(_script(name, each) for name, each in (data or {}).items()).decode(),
        "CODE": code,
        "TITLE": html.escape(f"{run}: rollouts"),  # last: a folder may be called @CODE@
    }
    return _filled((HERE / "page.html").read_text(encoding="utf-8"), filled)


def _filled(template: str, values: dict[str, str]) -> tuple[str, str]:
    """The page before its blocks, and after them; each name stands once in the template."""
    start, _, end = template.partition("@BLOCKS@")
    for name, value in values.items():
        before, _, after = start.partition(f"@{name}@")
        start = before + value + after
    return start, end


def _script(name: str, content: bytes) -> bytes:
    """A script element that holds data: no character of base64 could end it."""
    packed = base64.b64encode(gzip.compress(content, COMPRESSION, mtime=0))
    return b'<script type="application/gzip" id="%s">%s</script>\n' % (name.encode(), packed)


def as_json(value: object) -> bytes:
    """ASCII, so that lone surrogates come through; numbers that are not finite become null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":")).encode()


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _hash(text: str) -> str:
    """The hash by which the page's content policy allows this text, and no other."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
