"""Dumps written as the batcher writes them, and pages read as a browser reads them."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from async_grpo.telemetry.jsonl import to_json
from async_grpo.viewing import page
from async_grpo.viewing.page.build import write_page

CODE = Path(page.__file__).parent
NEEDS_NODE = pytest.mark.skipif(
    not shutil.which("node"), reason="needs node, to run the page's code"
)
KINDS = {"Float64Array": "<f8", "Uint32Array": "<u4", "Uint16Array": "<u2"}


def sample(ordinal, index=0, **changes):
    line = {
        "batch": ordinal // 2, "ordinal": ordinal, "attempt": 0, "index": index,
        "fate": "trained", "given": False, "dataset_type": "", "input": f"question {ordinal}",
        "output": "an answer", "answer": "4", "reward": float(index), "format_reward": None,
        "overlong_penalty": 0.0, "kl_penalty": 0.0, "advantage": index - 0.5,
        "verdict": "scored", "adapter": "mathd", "reason": "", "finish_reason": "stop",
        "num_input_tokens": 3, "num_output_tokens": 4 + index,
        "weights_versions": [["7.0", 0, 4 + index]],
    }  # fmt: skip
    return line | changes


def held_out(batch, number, index=0, **changes):
    own = {"set": "", "question": number, "fate": "held_out", "advantage": None}
    return sample(2 * batch + 1, index, batch=batch, **(own | changes))


def write_dump(folder, lines, *, tail=b"", evaluated=(), **params):
    folder.mkdir(parents=True, exist_ok=True)
    content = b"".join(to_json(line) + b"\n" for line in lines)
    (folder / "samples.jsonl").write_bytes(content + tail)
    if evaluated:
        content = b"".join(to_json(line) + b"\n" for line in evaluated)
        (folder / "samples.held_out.jsonl").write_bytes(content)
    params = {"batch_size": 2, "aggregation": "sample-mean", "model_name_or_path": ""} | params
    (folder / "training_params.json").write_text(json.dumps(params))
    return folder


def write(folder, *, max_samples=100_000, max_mib=1024.0, tokenizer=None):
    """The page of a run's folder."""
    output = folder / "rollouts.html"
    write_page(
        folder, output, max_samples=max_samples, max_mib=max_mib, find_tokenizer=lambda _: tokenizer
    )
    return output


class Page:
    """What a page holds."""

    def __init__(self, path):
        self.text = path.read_text()
        self.header = json.loads(self._script("header"))
        buffer, self.columns = self._script("columns"), {}
        for name, kind in self.header["columns"]:
            size = np.dtype(KINDS[kind]).itemsize * self.header["num_samples"]
            own, buffer = buffer[:size], buffer[size:]
            self.columns[name] = np.frombuffer(own, KINDS[kind]).tolist()
        assert not buffer
        self.details = [
            detail
            for number in range(len(self.header["blocks"]))
            for detail in json.loads(self._script(f"block-{number}"))
        ]

    def labels(self, name):
        return [self.header["labels"][name][number] for number in self.columns[name]]

    def _script(self, name):
        [content] = re.findall(f'id="{name}">([^<]*)</script>', self.text)
        return gzip.decompress(base64.b64decode(content))


def called(file, function, calls):
    """What a function of the page's code returns for each list of arguments, in one process."""
    code = (
        "const functions = require(process.argv[1]);"
        "const calls = JSON.parse(require('fs').readFileSync(0));"
        "console.log(JSON.stringify(calls.map((given) => functions[process.argv[2]](...given))));"
    )
    answer = subprocess.run(
        ["node", "-e", code, str(CODE / file), function],
        input=json.dumps(calls), capture_output=True, check=True, text=True,
    )  # fmt: skip
    return json.loads(answer.stdout)


def recomputed(config, rows):
    """[what the page computes of each token] of each row."""
    return called("weight.js", "tokenWeights", [[config, row] for row in rows])


def rows_of(shown, member):
    """The rows of a sample as `withWeights` in page.js makes them of the page's numbers."""
    detail, at = shown.details[member], 0
    for row in detail["rows"]:
        trained = [t for t, bit in enumerate(row["mask"]) if bit == "1"]
        own = slice(at, at := at + len(row["tokens"]))
        advantages = detail.get("advantages", [shown.columns["advantage"][member]] * own.stop)[own]
        columns = {name: row[name] for name in ("behaviour", "reference", "teacher")}
        yield {
            "w": shown.columns["weight"][member],
            "advantages": [advantages[t] for t in trained],
            "logprobs": row["logprobs"],
            "old": row["old"],
            **{n: each and [each[t] for t in trained] for n, each in columns.items()},
        }


def recomputed_weights(shown):
    """(what the page computes, what the trainer computed) of all trained tokens of a page."""
    modes = {step["step"]: step["ratio_mode"] for step in shown.header["steps"]}
    assert len(set(modes.values())) == 1
    config = shown.header["config"] | {"mode": modes.popitem()[1]}
    rows = [
        row
        for member, fate in enumerate(shown.labels("fate"))
        if fate == "trained"
        for row in rows_of(shown, member)
    ]
    found = [token["gradient"] for row in recomputed(config, rows) for token in row]
    trainers = [
        gradient
        for told, fate in zip(shown.details, shown.labels("fate"), strict=True)
        if fate == "trained"
        for row in told["rows"]
        for gradient in row["gradients"]
    ]
    return found, trainers
