"""Shows that a refactor keeps training bit-identical: four seeded runs, before and after it.

    python tools/seeded_runs.py --write before.json
    python tools/seeded_runs.py --compare before.json

plain: GRPO on one rank; kl: a penalty to the reference model, on two ranks; environment: two turns
an episode; teacher: its divergence and its log-probabilities. The commands are those of users, all
with --deterministic and --max-staleness 0; only the engine's tokens are scripted, by the seed of
each request. Compared are every exported tensor, every metric that is not a time, and every sample
that was dumped. Differences are told in a table, and end the command with 1; bits are of one kind
of machine and release of torch, so both stand in the file too.

No row shares a forward of the reference model or of a teacher with another: which rows had gathered
would decide how it rounds. Prompts are longer than outputs, and a forward has room for one row.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import safetensors

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = REPOSITORY / "tests"
sys.path[:0] = [str(REPOSITORY), str(TESTS / "integration")]

from commands import Command, dispatcher, trainer  # noqa: E402 - after their folder
from private_cluster import PrivateCluster, environment  # noqa: E402

MODEL, TEACHER = (REPOSITORY / "sample-data" / name for name in ("tiny-countdown", "tiny-teacher"))
PROMPT, OUTPUT = 24, 16  # tokens of every prompt, and of the longest output
NAMESPACE = ("--namespace", "seeded-runs")
NUM_BATCHES, READY_S, RUN_S = 3, 300.0, 300.0
COMMON = (
    *("--deterministic", "--max-staleness", 0, "--num-training-batches", NUM_BATCHES),
    *("--max-generation-tokens", OUTPUT, "--max-tokens-per-gpu", 2 * (PROMPT + OUTPUT)),
    *("--min-samples-per-checkpoint", 1, "--dump-token-columns", *NAMESPACE),
)
SEVERAL_STEPS = (
    *("--train-minibatch-size", 2, "--ratio-mode", "decoupled"),
    *("--importance-correction", "truncate"),
)
RUNS: dict[str, tuple[int, tuple[object, ...]]] = {  # ranks, options
    "plain": (1, ()),
    "kl": (
        2,
        (
            *("--kl-coefficient", 0.05, "--num-batches-per-ref-model-update", 2),
            *("--mask-truncated-samples", *SEVERAL_STEPS),
        ),
    ),
    "environment": (
        1,
        ("--environment", TESTS / "environments" / "two_turns.py:TwoTurns", *SEVERAL_STEPS),
    ),
    "teacher": (
        1,
        (
            *("--teacher-for", "larger", "--gkd-coefficient", 0.7, "--gkd-alpha", 0.3),
            *("--gkd-temperature", 1.5, "--gkd-top-k", 5, "--opd-coefficient", 0.5),
        ),
    ),
}
# Names of metrics, and columns of samples, that tell of clocks, of how much was under way at a
# moment, or of the machine.
TIMED = re.compile(
    r"seconds|per_second|idle|^sync_|^mfu|^peak_|retries|perc_resampled"
    r"|^avg_(generating|verifying|scoring)_samples"
)
OF_A_START = re.compile(r"^weights_versions$|^worker|_id$|seconds|time")


def write_questions(folder: Path) -> Path:
    """Eight lines, each of them digits and a number as its answer."""
    lines = [
        {"input": f"{7 ** (40 + n)}"[: PROMPT - 1] + "=", "answer": str(8 * n + 3)}
        for n in range(8)
    ]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@contextlib.contextmanager
def workers() -> Iterator[str]:
    """The address of a cluster of our own, with one worker of each role."""
    scripted = environment(PYTHONPATH=str(TESTS))
    cluster = PrivateCluster(env=scripted)
    common = ("--ray-address", cluster.address, *NAMESPACE)
    one_row = ("--max-tokens-per-gpu", PROMPT + OUTPUT, *NAMESPACE)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.stop)
        started = [
            Command(
                *("-m", "faults.scripted_dispatcher", "--model-path", MODEL),
                *("--reward-fns", "benchmarks/rewards.py:scattered"),
                *("--global-num-verifiers", 1, *common),
                env=scripted,
            ),
            Command("worker_dispatcher.py", "--mode", "environment", *common),
            dispatcher(cluster.address, MODEL, "--mode", "logprob", *one_row),
            dispatcher(cluster.address, TEACHER, "--mode", "teacher", "--name", "larger", *one_row),
        ]
        for command in started:
            stack.enter_context(command)
        for command in started:
            command.wait_for("registered", timeout_s=READY_S)
        yield cluster.address


def train(name: str, address: str, questions: Path, *options: object) -> dict[str, Any]:
    """What a run has left that its seed decides."""
    num_ranks, own = RUNS[name]
    output = questions.parent / name
    with trainer(
        *(address, MODEL, questions, output, *COMMON, *own, *options),
        ranks=num_ranks,
    ) as run:
        if run.wait(timeout_s=RUN_S):
            raise SystemExit(f"{name} has failed: {run.out[-2000:]}\n{run.err[-6000:]}")
    exports = sorted((output / "hf_format").iterdir(), key=lambda f: int(f.name.split("_")[1]))
    return {
        "weights": {folder.name: hash_of_weights(folder) for folder in exports},
        "steps": lines_of(output / "training_metrics.jsonl", without=TIMED),
        "samples": samples_of(output / "samples.jsonl"),
    }


def hash_of_weights(folder: Path) -> str:
    """Of every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(safetensors.deserialize(file.read_bytes())):
            digest.update(f"{name} {tensor['dtype']} {tensor['shape']} ".encode())
            digest.update(tensor["data"])
    return digest.hexdigest()


def samples_of(file: Path) -> dict[str, str]:
    """{column: a hash of what all samples have there, in the order of their questions}."""
    order = itemgetter("ordinal", "attempt", "index")
    lines = sorted(lines_of(file, without=OF_A_START), key=order)
    return {name: hash_of([line.get(name) for line in lines]) for name in lines[0]}


def lines_of(file: Path, *, without: re.Pattern[str]) -> list[dict[str, Any]]:
    """The lines of a JSONL file, with no entry of such a name in any depth."""

    def kept(row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if not without.search(name)}

    return [json.loads(line, object_hook=kept) for line in file.read_text().splitlines()]


def hash_of(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def machine() -> dict[str, str]:
    """What decides how sums are rounded, beside our code."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "processor": cpu[1] if cpu else platform.machine(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
    }


def differences(path: str, before: Any, after: Any) -> Iterator[tuple[str, str, str]]:
    """(where, before, after) of every value that is not the same."""
    if isinstance(before, list) and isinstance(after, list):
        before, after = (dict(enumerate(values, 1)) for values in (before, after))
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            found = before.get(key, "missing"), after.get(key, "missing")
            yield from differences(f"{path} {key}".strip(), *found)
    elif json.dumps(before) != json.dumps(after):  # a NaN is equal to itself there
        yield path, json.dumps(before).strip('"')[:24], json.dumps(after).strip('"')[:24]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", metavar="FILE", type=Path, help="keep what the runs came to")
    what.add_argument("--compare", metavar="FILE", type=Path, help="with what --write has kept")
    parser.add_argument("--run", action="append", choices=RUNS, help="only this one; may repeat")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=37)
    parser.add_argument("--algorithm", help="path:Name: of a copy of the shipped one")
    asked = parser.parse_args()
    before = json.loads(asked.compare.read_text()) if asked.compare else {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster ends with us
    options: tuple[object, ...] = (
        "--learning-rate",
        asked.learning_rate,
        "--infinite-sampler-seed",
        asked.seed,
    )
    options += ("--algorithm", asked.algorithm) if asked.algorithm else ()
    after: dict[str, Any] = {"machine": machine(), "runs": {}}
    with tempfile.TemporaryDirectory() as folder, workers() as address:
        questions = write_questions(Path(folder))
        for name in asked.run or RUNS:
            began = time.monotonic()
            found = after["runs"][name] = train(name, address, questions, *options)
            told = "  ".join(f"{part} {hash_of(found[part])[:16]}" for part in found)
            sys.stdout.write(f"{name:<12} {told}  {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()
    if asked.write:
        asked.write.write_text(json.dumps(after, indent=1) + "\n")
        return 0
    before["runs"] = {name: run for name, run in before["runs"].items() if name in after["runs"]}
    return tell(list(differences("", before, after)))


def tell(found: list[tuple[str, str, str]]) -> int:
    """Write the table; the exit code."""
    width = max((len(path) for path, *_ in found), default=0)
    for path, before, after in (("", "before", "after"), *found) if found else ():
        sys.stdout.write(f"{path:<{width}}  {before:<24}  {after}\n")
    sys.stdout.write(f"{len(found)} values differ\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
