"""Passes reward functions from a script or notebook to the verifier processes.

A function of a notebook's cell has no module that another process could import. So all functions
are written by value into a reward file in the run's folder: verifiers run its text, on any machine,
and a resumed run finds it there.
"""

from __future__ import annotations

import base64
import inspect
import keyword
import platform
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import cloudpickle

from async_grpo.util.errors import ConfigError

Reward = Callable[..., object]  # (sample as a dict) -> a number, or a dict of numbers
Rewards = Reward | str | Sequence[Reward | str]  # functions, or names as --reward-fns takes them
MAX_MIB = 16.0  # of all functions and what they refer to: each verifier process holds it
FILE = """\
# Rewards that Python's `async_grpo.train` was given, by value (Python {python}, cloudpickle
# {cloudpickle}). As they were written:
#
{source}

import base64

import cloudpickle

globals().update(cloudpickle.loads(base64.b64decode(
{pickled}
)))
"""


@dataclass(frozen=True, slots=True)
class RewardFile:
    """The rewards that verifiers run, and the file that holds them."""

    names: tuple[str, ...]  # as --reward-fns takes them
    path: Path
    text: str  # of the file; empty: none is needed
    asks: bool = False  # it is one asynchronous reward, which an environment worker runs

    def write(self) -> None:
        """Write the file, whose name has its hash: no other file is replaced."""
        if self.text:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.write_text(self.text)


def reward_file(rewards: Rewards, *, folder: Path) -> RewardFile:
    """Put functions by value into a file of `folder`; names for `--reward-fns` stay names.

    Raises `ConfigError` for an object that is no reward, or cannot be pickled.
    """
    given = [rewards] if isinstance(rewards, str) or callable(rewards) else list(rewards)
    functions: dict[str, Reward] = {}
    names = []
    for reward in given:
        if isinstance(reward, str):
            names.append(reward)
            continue
        check_reward(reward)
        name = _free_name(reward, taken=functions)
        functions[name] = reward
        names.append(name)
    if not names:
        raise ConfigError("reward must be a function, or several, got none: give one")
    pickled = _pickled(functions) if functions else b""
    path = folder / f"rewards_{sha256(pickled).hexdigest()[:8]}.py"
    if functions and "," in str(path):
        raise ConfigError(f"output_dir must hold no comma, got {str(folder)!r}: name another")
    named = tuple(f"{path}:{name}" if name in functions else name for name in names)
    asks = any(map(inspect.iscoroutinefunction, functions.values()))
    if asks and len(named) > 1:
        raise ConfigError(
            f"an asynchronous reward must be the only one, got {', '.join(names)}: await the "
            "others in it, `services.verify(question, [episode])` asks those of --reward-fns"
        )
    return RewardFile(named, path, _text(functions, pickled) if functions else "", asks)


def check_reward(reward: object) -> None:
    """Raise `ConfigError` unless `reward` can be called with one sample.

    An asynchronous one is called with (question, episode, services).

    >>> check_reward(lambda prompts, completions: 1.0)
    Traceback (most recent call last):
    async_grpo.util.errors.ConfigError: reward <lambda> must take one sample, a dict, got \
(prompts, completions): write def my_reward(sample), which has input, answer, output and the \
data's columns
    """
    name = getattr(reward, "__name__", repr(reward))
    if not callable(reward):
        raise ConfigError(f"reward must be a function or a name, got {reward!r}: give one")
    if inspect.isgeneratorfunction(reward) or inspect.isasyncgenfunction(reward):
        raise ConfigError(f"reward {name} must be no generator: have it return a number")
    asks = inspect.iscoroutinefunction(reward)
    try:
        signature = inspect.signature(reward)
    except (ValueError, TypeError):  # of functions written in C
        return
    try:
        signature.bind(*({}, {}, {}) if asks else ({},))
    except TypeError:
        rule = "one sample, a dict"
        args = "(sample), which has input, answer, output and the data's columns"
        if asks:
            rule, args = "what it grades and asks", "(question, episode, services)"
        raise ConfigError(
            f"reward {name} must take {rule}, got {signature}: write def my_reward{args}"
        ) from None


def _pickled(functions: Mapping[str, Reward]) -> bytes:
    with _by_value(function.__module__ for function in functions.values()):
        try:
            pickled: bytes = cloudpickle.dumps(dict(functions))
        except Exception as error:  # pickling runs the user's code, which may raise anything
            raise ConfigError(
                f"reward {', '.join(functions)} must be sent to verifier processes, and refers to "
                f"what cannot be ({type(error).__name__}: {error}): make that inside the function"
            ) from error
    size_mib = len(pickled) / 2**20
    if size_mib > MAX_MIB:
        raise ConfigError(
            f"reward {', '.join(functions)} must refer to at most {MAX_MIB:g} MiB, got "
            f"{size_mib:.1f}: read large tables from a file inside the function"
        )
    return pickled


@contextmanager
def _by_value(names: Iterator[str]) -> Iterator[None]:
    """Within the block, functions of modules that are not installed are pickled by value."""
    modules = [sys.modules[name] for name in {*names} if name in sys.modules]
    local = [module for module in modules if _is_local(module)]
    for module in local:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)


def _is_local(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" or not file or module.__name__.startswith("async_grpo."):
        return False
    installed = {Path(folder).resolve() for folder in sysconfig.get_paths().values()}
    return not installed & set(Path(file).resolve().parents)


def _free_name(reward: Reward, *, taken: Mapping[str, Reward]) -> str:
    own = getattr(reward, "__name__", type(reward).__name__)
    name = own if own.isidentifier() and not keyword.iskeyword(own) else "reward"
    numbered = (f"{name}_{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(each for each in numbered if each not in taken)


def _text(functions: Mapping[str, Reward], pickled: bytes) -> str:
    encoded = textwrap.wrap(base64.b64encode(pickled).decode(), 90)
    # Who reads the text alone sees what an asynchronous reward asks.
    shown = [
        f"if False:\n{textwrap.indent(source_of(each), '    ')}\n"
        for each in functions.values()
        if inspect.iscoroutinefunction(each)
    ]
    return "\n".join(shown) + FILE.format(
        python=platform.python_version(),
        cloudpickle=cloudpickle.__version__,
        source="\n#\n".join(map(_as_comment, functions.values())),
        pickled="\n".join(f'    "{line}"' for line in encoded),
    )


def source_of(function: Reward) -> str:
    """As it was written; where that is not known, a word for it."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        if inspect.iscoroutinefunction(function):
            return f"async def {function.__name__}(): ..."
        return re.sub(r" at 0x\w+", "", repr(function))


def _as_comment(function: Reward) -> str:
    source = source_of(function)
    return "\n".join(f"#     {line}".rstrip() for line in source.splitlines())
