"""A class in a file of the user: named by an option, read once, run where it is needed.

Reading does not run it. Its text travels with its hash: a file is run from this text on every
machine; a module must be installed there with the same text.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import linecache
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from modulefinder import ModuleFinder
from pathlib import Path
from traceback import FrameSummary
from types import ModuleType
from typing import Any, TypeVar

from async_grpo.util.errors import ConfigError

T = TypeVar("T")
INSTALLED = ("site-packages", "dist-packages")
PY_SOURCE = 1  # as `ModuleFinder` knows the kinds of modules


@dataclass(frozen=True, slots=True)
class UserCode:
    """The name and source of one class, as sent to the processes that use it."""

    name: str  # package.module:Name, or /whole/path/to/file.py:Name
    text: str  # of the file that holds it

    @classmethod
    def read(cls, name: str, *, option: str, shipped: Iterable[str]) -> UserCode:
        """The text that `option` names; raises `ConfigError` where there is none."""
        place, _, attribute = name.rpartition(":")
        try:
            if not place or not attribute:
                raise ImportError("there is none of that name")
            place = os.path.abspath(place) if place.endswith(".py") else place
            return cls(f"{place}:{attribute}", text_of(place))
        except (OSError, SyntaxError, ImportError, ValueError) as error:
            raise ConfigError(
                f"{option} must be {', '.join(shipped)}, package.module:Name or "
                f"path/to/file.py:Name, got {name!r}: {error}"
            ) from error

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def place(self) -> str:
        """The file or the module."""
        return self.name.rpartition(":")[0]

    def hashes(self, what: str) -> dict[str, str]:
        """{name: sha256} of its text, called `what`, and of the modules that it imports."""
        return {what: self.sha256} | hash_imported(path_of(self.place), what=what)

    def check_defined(self) -> None:
        """Raise `ConfigError` for a text that cannot be parsed, or that does not define the name.

        The text is not run: a star import or a change of globals counts as a definition.
        """
        nodes = self._nodes()
        bound = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        bound |= {node.id for node in nodes if isinstance(node, ast.Name)}
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        if not bound & {self.name.rpartition(":")[2], "*", "globals", "setattr", "__getattr__"}:
            raise ConfigError(
                f"{self.name} must be a class that its file defines, and there is none of that "
                "name: correct the file or the name"
            )

    def defines(self, method: str) -> bool:
        """Whether its class, or a base class in the same file, has that method."""
        return any(getattr(each, "name", "") == method for each in self._body())

    def awaits(self, method: str) -> bool:
        """Whether the first method of that name is a coroutine."""
        found = (each for each in self._body() if getattr(each, "name", "") == method)
        return isinstance(next(found, None), ast.AsyncFunctionDef)

    def states(self, attribute: str, default: object = None) -> object:
        """The literal value of a class attribute, `default` where there is none.

        For an expression that would have to be run, its source.

        >>> code = UserCode("f.py:B", "class A:\\n  x: int = 4\\nclass B(A):\\n  y = f()")
        >>> code.states("x"), code.states("y"), code.states("z")
        (4, 'f()', None)
        """
        for each in self._body():
            if isinstance(each, ast.Assign | ast.AnnAssign) and each.value:
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                if attribute in (getattr(target, "id", "") for target in targets):
                    try:
                        return ast.literal_eval(each.value)
                    except ValueError:
                        return ast.unparse(each.value)
        return default

    def _body(self) -> Iterator[ast.stmt]:
        """The statements of its class, then of its base classes in the same file."""
        classes = {node.name: node for node in self._nodes() if isinstance(node, ast.ClassDef)}
        names = [self.name.rpartition(":")[2]]
        for name in names:  # which grows
            if found := classes.pop(name, None):
                names += [base.id for base in found.bases if isinstance(base, ast.Name)]
                yield from found.body

    def keys_of(self, name: str) -> tuple[str, ...]:
        """The literal keys with which its source subscripts a variable `name`.

        >>> UserCode("f.py:A", "await services['index'](services[key])").keys_of("services")
        ('index',)
        """
        nodes = (node for node in self._nodes() if isinstance(node, ast.Subscript))
        found = (
            node.slice
            for node in nodes
            if name in (getattr(node.value, "id", ""), getattr(node.value, "attr", ""))
        )
        keys = (key.value for key in found if isinstance(key, ast.Constant))
        return tuple(dict.fromkeys(key for key in keys if isinstance(key, str)))

    def asks(self, method: str) -> bool:
        """Whether its source names an attribute `method`, of any object."""
        nodes = self._nodes()
        return any(isinstance(node, ast.Attribute) and node.attr == method for node in nodes)

    def _nodes(self) -> list[ast.AST]:
        try:
            return list(ast.walk(ast.parse(self.text, self.place)))
        except SyntaxError as error:
            raise ConfigError(f"{self.place} cannot be imported: {error!r}: correct it") from None

    def load(self, base: type[T]) -> type[T]:
        """Run the source, return the class; raises `ConfigError` unless it derives from `base`."""
        try:
            if self.place.endswith(".py"):
                module = run_file(self.place, self.text)
            else:
                self.require_same(UserCode(self.name, text_of(self.place)))
                module = importlib.import_module(self.place)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # the user's own code may raise anything
            raise ConfigError(f"{self.place} cannot be imported: {error!r}: correct it") from error
        found = getattr(module, self.name.rpartition(":")[2], None)
        if not isinstance(found, type) or not issubclass(found, base):
            raise ConfigError(
                f"{self.name} must be a class derived from {base.__name__}, got {found!r}: "
                "correct the file or the name"
            )
        return found

    def require_same(self, here: UserCode | None) -> None:
        """Raise `ConfigError` unless this process reads the same source as the run."""
        found = here.sha256 if here else "none"
        if found != self.sha256:
            raise ConfigError(
                f"{self.name} must be the same everywhere, the run's sha256 is {self.sha256}, got "
                f"{found} here: copy the one over the other, and start the run again"
            )

    def line_in(self, frames: Sequence[FrameSummary]) -> str:
        """Its innermost line of a traceback, for messages; without one, the innermost of all."""
        ends = (self.place, self.place.replace(".", os.sep) + ".py")
        own = [frame for frame in frames if frame.filename.endswith(ends)]
        if not frames:
            return "no line"
        frame = (own or frames)[-1]
        return f"{frame.filename}:{frame.lineno}, {frame.line}"


@functools.cache
def run_file(path: str, text: str) -> ModuleType:
    """Run a file's text once, as a module under a name that hides no installed module."""
    spec = importlib.util.spec_from_file_location("user_file_" + re.sub(r"\W", "_", path), path)
    assert spec is not None, "every .py file has a loader"
    sys.path.append(os.path.dirname(path))  # its neighbours are importable, and hide nothing
    return run_module(spec, text)


def run_module(spec: ModuleSpec, text: str) -> ModuleType:
    """Run the module of a spec from `text` instead of from its file."""
    module, path = importlib.util.module_from_spec(spec), str(spec.origin)
    sys.modules[spec.name] = module  # where its dataclasses look for their annotations
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def path_of(place: str) -> str:
    """The path of a .py file or of a module."""
    if place.endswith(".py"):
        return place
    spec = importlib.util.find_spec(place)
    if spec is None or spec.origin is None:
        raise ImportError(f"there is no module {place}")
    return spec.origin


def text_of(place: str) -> str:
    """The source of a .py file or of a module."""
    with tokenize.open(path_of(place)) as file:  # in the encoding that the file declares
        return file.read()


def hash_imported(path: str, *, what: str) -> dict[str, str]:
    """{name: sha256} of the modules that a file imports, directly or not, from its own folder.

    They are named by their path there, "helper.py of WHAT". Installed modules are left out.
    """
    folder = Path(path).parent
    searched = [] if folder.name in INSTALLED else [str(folder)]
    finder: Any = ModuleFinder(searched, excludes=["async_grpo"])
    finder.add_module("own").__path__ = searched  # a package, where modules import their siblings
    # What cannot be read has no imports; whoever loads it says why.
    with contextlib.suppress(OSError, SyntaxError, ValueError), open(path, "rb") as file:
        finder.load_module("own.file", file, path, (".py", "rb", PY_SOURCE))
    finder.modules.pop("own.file", None)
    places = sorted(Path(each.__file__) for each in finder.modules.values() if each.__file__)
    return {
        f"{each.relative_to(folder)} of {what}": hashlib.sha256(each.read_bytes()).hexdigest()
        for each in places
    }
