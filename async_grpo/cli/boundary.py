"""How a command reports an error: one line instead of a traceback, and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from async_grpo.cluster.head import settle_authentication
from async_grpo.util.errors import AsyncGrpoError
from async_grpo.util.imports import hide_misfits

EXIT_ERROR = 1
EXIT_SIGNAL = 128  # and the signal's number, as shells have it: 130 Ctrl-C, 143 SIGTERM

DEPENDENCIES = frozenset(
    {
        "accelerate", "cloudpickle", "datasets", "flash_attn", "huggingface_hub", "math_verify",
        "matplotlib", "numpy", "pylatexenc", "ray", "rich", "safetensors", "sympy", "tensorboard",
        "torch", "transformers", "vllm", "xxhash",
    }
)  # fmt: skip
REMEDY = "run `make setup`, or pip install -r requirements/cpu.txt (gpu.txt with NVIDIA devices)"


@contextmanager
def command_boundary() -> Iterator[None]:
    """Around a command's body, as `with` or as a decorator below click's own.

    `AsyncGrpoError`: its message on one line, exit 1. A dependency that is missing or broken: one
    line with the remedy, exit 1. Ctrl-C: exit 130, SIGTERM: 143. Anything else is a bug and keeps
    its traceback. The token is settled first, because Ray reads the mode when a body imports it;
    packages that do not fit are hidden before transformers finds them.
    """
    settle_authentication()
    hide_misfits(os.environ)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        click.echo(str(interrupt) or "interrupted", err=True)
        sys.exit(EXIT_SIGNAL + getattr(interrupt, "number", signal.SIGINT))
    except AsyncGrpoError as error:
        _fail(_one_line(error))
    except (ImportError, RuntimeError, OSError) as error:
        if not (explanation := _explain_dependency(error)):
            raise
        _fail(explanation)


def _explain_dependency(error: BaseException) -> str:
    """One sentence if `error` comes from importing a dependency of ours, else nothing."""
    chain: BaseException | None = error
    while chain is not None:
        if "torchvision::nms" in str(chain):
            return f"torchvision does not fit torch: pip uninstall torchvision, or {REMEDY}"
        if isinstance(chain, ImportError) and (package := _culprit(chain)):
            return f"cannot import {package} ({_one_line(chain)}): {REMEDY}"
        chain = chain.__cause__  # not its context: an ImportError may have been handled there
    return ""


def _culprit(error: ImportError) -> str:
    """The dependency that could not be imported, or that failed while it imported something."""
    missing = (error.name or "").partition(".")[0]
    if missing in DEPENDENCIES:
        return missing
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    importing = (str(each.f_globals.get("__name__", "")).partition(".")[0] for each in frames)
    return next((package for package in importing if package in DEPENDENCIES), "")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(EXIT_ERROR)
