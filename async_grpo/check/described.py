"""Facts of a user's algorithm: a confined process imports it and prints them as JSON.

`check`, `plan` and `launch --dry-run` read files that a stranger may have written. They need a few
facts of an algorithm's class; nothing else comes out of the process that imports its code.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from async_grpo.algorithms import find
from async_grpo.algorithms.base import Algorithm, ScoreNeed
from async_grpo.config.train_config import TrainConfig
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import UserCode
from async_grpo.verification import confinement, namespaces
from async_grpo.verification.config import Isolation

MODULE = "async_grpo.check.described"
SCRATCH_MIB = 256
Told = dict[str, Any]  # of an algorithm, in JSON
NEED = ("role", "num_columns", "before_advantages", "of_given")


class Described(Algorithm):
    """Stands for an algorithm whose code is not imported here."""

    def __init__(self, config: TrainConfig, told: Told) -> None:
        super().__init__(config)
        self.needs = tuple(ScoreNeed(**need) for need in told["needs"])
        self.learns_from_pairs = bool(told["learns_from_pairs"])
        self.uses_old_policy = bool(told["uses_old_policy"])


@contextlib.contextmanager
def users_code_confined(*, trusted: bool) -> Iterator[None]:
    """In the block, this process imports no user's algorithm, unless its code is `trusted`."""
    before = find.import_elsewhere
    find.import_elsewhere = before if trusted else _describe
    try:
        yield
    finally:
        find.import_elsewhere = before


def _describe(config: TrainConfig, code: UserCode) -> Algorithm:
    """Raises `ConfigError` for no algorithm, for refused options, and without confinement."""
    return Described(config, _told(config.but(model_name_or_path="any"), code))


@functools.cache
def _told(config: TrainConfig, code: UserCode) -> Told:
    isolation = Isolation(
        confined=True, network=False, seen_as=os.geteuid(), scratch_mib=SCRATCH_MIB
    )
    if why := confinement.why_unconfined(isolation):
        raise ConfigError(
            f"{code.name} is imported in bubblewrap's confinement alone, which fails here ({why}): "
            "read the file, then give --trust"
        )
    asked = {"config": config.options(), "code": [code.name, code.text, code.arguments]}
    try:
        done = subprocess.run(
            confinement.server_command(isolation, module=MODULE),
            env=confinement.environment(os.environ) | {"TMPDIR": "/dev/shm"},
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=deadlines.GRADERS_LOADED_S,
        )
        told: Told = json.loads(done.stdout)
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{code.place} must be imported within {deadlines.GRADERS_LOADED_S:g} s, without the "
            f"network, and come back, but did not ({type(error).__name__}): have it do less when "
            "it is imported, or give --trust"
        ) from None
    if "error" in told:
        raise ConfigError(str(told["error"]))
    return told


def main() -> None:
    """In the confined process: print facts of one algorithm, on a pipe that its prints miss."""
    namespaces.prctl(namespaces.PR_SET_NO_NEW_PRIVS, 1)
    namespaces.drop_capabilities()
    asked, answer = json.load(sys.stdin), os.dup(1)
    os.dup2(2, 1)
    try:
        config = TrainConfig(**asked["config"])
        found = find.find_algorithm(config, UserCode(*asked["code"]))
        needs = [{name: getattr(need, name) for name in NEED} for need in found.needs]
        told = {
            "needs": needs,
            "learns_from_pairs": found.learns_from_pairs,
            "uses_old_policy": found.uses_old_policy,
        }
    except ConfigError as error:
        told = {"error": str(error)}
    os.write(answer, json.dumps(told).encode())


if __name__ == "__main__":
    main()
