"""Peak memory of one way through the head, as the kernel saw it, in a process of its own.

CPU torch counts no memory, so that the process's high-water mark is read, forward and backward:

    python -m benchmarks.head_memory 256 --tokens 2048 --vocabulary 151936 --hidden 64
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

STATUS = Path("/proc/self/status")
RESET_PEAK = ("/proc/self/clear_refs", "5")  # man proc_pid_clear_refs
FEW_TOKENS = 8  # of a first pass, in which libraries set up what they keep


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes beyond inputs and their gradients."""

    forward: int
    backward: int


def measure(chunk_size: int, *, num_tokens: int, vocab_size: int, hidden_size: int) -> Peaks:
    """Of log-probabilities and loss in a fresh process; chunk size 0: full logits."""
    sizes = ["--tokens", num_tokens, "--vocabulary", vocab_size, "--hidden", hidden_size]
    command = [sys.executable, "-m", "benchmarks.head_memory", chunk_size, *sizes]
    run = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE)
    return Peaks(**json.loads(run.stdout))


@click.command()
@click.argument("chunk_size", type=int)
@click.option("--tokens", "num_tokens", required=True, type=int)
@click.option("--vocabulary", "vocab_size", required=True, type=int)
@click.option("--hidden", "hidden_size", required=True, type=int)
def main(chunk_size: int, num_tokens: int, vocab_size: int, hidden_size: int) -> None:
    """Print the peaks of one way as JSON."""
    from benchmarks import heads  # torch, which the parent does not need for this

    way = heads.chunked(chunk_size) if chunk_size else heads.full_logits
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size}
    heads.loss_of(way, heads.make_inputs(FEW_TOKENS, **sizes)).backward()
    inputs = heads.make_inputs(num_tokens, **sizes)
    before = _status_bytes("VmRSS")
    _reset_peak()
    loss = heads.loss_of(way, inputs)
    forward = _status_bytes("VmHWM") - before
    _reset_peak()
    loss.backward()
    backward = _status_bytes("VmHWM") - before - inputs.gradient_bytes
    click.echo(json.dumps({"forward": forward, "backward": backward}))


def _reset_peak() -> None:
    path, command = RESET_PEAK
    Path(path).write_text(command)


def _status_bytes(name: str) -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
