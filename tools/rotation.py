"""Runs a tenth of the slow tests, chosen by the commit, so that each is run every few commits.

    python tools/rotation.py                    the tenth of HEAD
    python tools/rotation.py --tenth 3          another one, 0 to 9
    python tools/rotation.py --list             which files it would run, and none

A file belongs to a tenth by the hash of its path, a commit to one by its own. Files run one after
the other. The exit code is 1 if one failed or was not run within the limit, and each such file is
named with the commit that had it in its rotation before: the last one at which it was green, unless
that commit's own rotation was red.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SUITE = ("tests", "async_grpo", "sample-data", "benchmarks")
TENTHS = 10
LIMIT_S = 40 * 60.0
ENDED_S = 60.0
NOTHING_COLLECTED = 5  # pytest's exit code
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")


def tenth_of_file(path: str) -> int:
    return int(sha256(path.encode()).hexdigest(), 16) % TENTHS


def tenth_of_commit(commit: str) -> int:
    """Of the first half of the hash, which every clone knows in full."""
    return int(commit[:20], 16) % TENTHS


def files_in(collected: str, tenth: int) -> list[str]:
    """The files of a tenth among those that `pytest --collect-only -qq` lists with their tests.

    >>> files_in("tests/a.py: 2\\ntests/b.py: 1\\n\\n", tenth_of_file("tests/a.py"))
    ['tests/a.py']
    """
    files = [line.rpartition(": ")[0] for line in collected.splitlines()]
    return [file for file in files if file and tenth_of_file(file) == tenth]


def commit_before(commits: Sequence[str], tenth: int) -> str:
    """The newest of `commits`, newest first, that has this tenth; "" if none has."""
    return next((commit for commit in commits if tenth_of_commit(commit) == tenth), "")


def collected() -> str:
    """The files with slow tests that need no device, and the number of those."""
    done = subprocess.run(
        [*PYTEST, "--collect-only", "-q", "-n", "0", "-m", "slow and not gpu", *SUITE],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"the slow tests cannot be collected:\n{done.stdout}{done.stderr}")
    return done.stdout


def git(*words: str) -> list[str]:
    done = subprocess.run(
        ["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def run(files: Sequence[str], *, limit_s: float) -> dict[str, str]:
    """Run files until the limit; return {file: what is wrong} of those that are not green."""
    deadline = time.monotonic() + limit_s
    red = {}
    for file in files:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            red[file] = f"was not begun within {limit_s:.0f} s"
            continue
        command = [*PYTEST, "-n", "0", "-m", "slow and not gpu", file]
        with subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True) as tests:
            try:
                code = tests.wait(timeout=left_s)
            except subprocess.TimeoutExpired:
                end(tests)
                red[file] = f"did not end within the {limit_s:.0f} s of its tenth"
                continue
        if code not in (0, NOTHING_COLLECTED):
            red[file] = "failed"
    return red


def end(tests: subprocess.Popen[bytes]) -> None:
    """Interrupt tests, which end what they have started, and kill what does not."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(tests.pid, number)
            tests.wait(timeout=ENDED_S)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tenth", type=int, choices=range(TENTHS))
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    head, *before = git("log", "--first-parent", "--format=%H")
    tenth = tenth_of_commit(head) if given.tenth is None else given.tenth
    files = files_in(collected(), tenth)
    say(f"tenth {tenth} of the slow tests, at {head[:12]}: {', '.join(files) or 'no file'}")
    if given.list:
        return
    red = run(files, limit_s=LIMIT_S)
    last = commit_before(before, tenth)
    said = f"last tried at {last[:12]}" if last else "never tried before in this history"
    for file, what in red.items():
        say(f"RED {file} {what}; {said}")
    sys.exit(bool(red))


if __name__ == "__main__":
    main()
