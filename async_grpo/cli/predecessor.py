"""Options of other trainers that have no part here: harmless ones are taken, others not.

They are hidden: a new command line needs none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

NOT_BUILT = ("tensor", "pipeline", "context")  # of the ways to divide a model among ranks


def predecessor_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives a click command these options, and its function nothing of them."""
    kept_apart = click.option(  # its runs were told apart by this name, ours are by --namespace
        "--experience-batcher-name", hidden=True, expose_value=False
    )
    rank = click.option(
        "--global-rank", type=int, hidden=True, expose_value=False, callback=_check_rank
    )
    phrases = click.option(
        "--insert-reasoning-phrases/--no-insert-reasoning-phrases",
        hidden=True,
        expose_value=False,
        callback=_refuse_phrases,
    )
    for way in NOT_BUILT:
        parallel = click.option(
            f"--{way}-parallel-size",
            type=int,
            hidden=True,
            expose_value=False,
            callback=_refuse_parallel,
        )
        function = parallel(function)
    return kept_apart(rank(phrases(function)))


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
