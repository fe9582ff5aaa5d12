"""A class in a file of the user: named by an option, read once, run where it is needed.

Reading does not run it. Its text travels with its hash: a file is run from this text on every
machine; a module must be installed there with the same text. Arguments stand behind its name, as in
a call, and are checked by the text: `path/to/file.py:Name(size=4)`.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import math
import os
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
CALL = re.compile(r"(.+?:\w+)\((.*)\)", re.DOTALL)
NO_TEXT = re.compile(r"""['"\\\x00-\x1f\x7f]""")  # what would end a quoted text, or a line
EMPTY = inspect.Parameter.empty
ANY_NAME = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
KINDS: dict[object, tuple[type, ...]] = {  # annotations that say what an argument must be
    "int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "list": (list,),
}  # fmt: skip


def as_name(value: object) -> object:
    """`{path = "...", size = 4}` of a run's file as it is typed; other values as they are.

    >>> as_name({"path": "my.py:Guess", "size": 4, "words": ["it's"]})
    "my.py:Guess(size=4, words=['it\\\\x27s'])"
    """
    if isinstance(value, list):
        if other := [each for each in value if not isinstance(each, str | Mapping)]:
            remedy = 'write ["path/to/file.py:name"]'
            raise ConfigError(f"names must be texts or tables, got {other[0]!r}: {remedy}")
        return [as_name(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    given = dict(value)
    path = given.pop("path", None)
    if not isinstance(path, str):
        remedy = 'write {path = "path/to/file.py:Name", size = 4}'
        raise ConfigError(f"a table of arguments must have a path, got {value!r}: {remedy}")
    written = ", ".join(f"{key}={_written(key, given[key])}" for key in sorted(given))
    return f"{path}({written})" if given else path


def _written(key: str, value: object) -> str:
    """A value as Python has it; texts so that each quote in it begins or ends one."""
    if isinstance(value, str):
        return "'" + NO_TEXT.sub(lambda found: f"\\x{ord(found[0]):02x}", value) + "'"
    if isinstance(value, list):
        return f"[{', '.join(_written(key, each) for each in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{_written(key, name)}: {_written(key, each)}" for name, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    raise ConfigError(
        f"the argument {key} must be a number, a text, true, false, or a list or table of these, "
        f"got {value!r}: write it as one"
    )


def split_arguments(name: str) -> tuple[str, str]:
    """The name of a class or function, and the arguments behind it.

    >>> split_arguments("my.py:Guess(size=4)"), split_arguments("my.py:Guess")
    (('my.py:Guess', 'size=4'), ('my.py:Guess', ''))
    """
    found = CALL.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


@dataclass(frozen=True, slots=True)
class UserCode:
    """The name and source of one class, as sent to the processes that use it."""

    name: str  # package.module:Name, or /whole/path/to/file.py:Name
    text: str  # of the file that holds it
    arguments: str = ""  # with which its class is made: "size=4"

    @classmethod
    def read(cls, name: str, *, option: str, shipped: Iterable[str]) -> UserCode:
        """The text that `option` names; raises `ConfigError` where there is none."""
        called, arguments = split_arguments(name)
        place, _, attribute = called.rpartition(":")
        try:
            if not place or not attribute:
                raise ImportError("there is none of that name")
            place = os.path.abspath(place) if place.endswith(".py") else place
            return cls(f"{place}:{attribute}", text_of(place), arguments)
        except (OSError, SyntaxError, ImportError, ValueError) as error:
            raise ConfigError(
                f"{option} must be {', '.join(shipped)}, package.module:Name or "
                f"path/to/file.py:Name, got {name!r}: {error}"
            ) from error

    @property
    def sha256(self) -> str:
        """Of its text, and of its arguments where it has some."""
        return hash_text(self.text, self.arguments)

    @property
    def place(self) -> str:
        """The file or the module."""
        return self.name.rpartition(":")[0]

    def hashes(self, what: str) -> dict[str, str]:
        """{name: sha256} of its text, called `what`, and of the modules that it imports."""
        return {what: self.sha256} | hash_imported(path_of(self.place), what=what)

    @property
    def values(self) -> dict[str, Any]:
        """{argument: its value}; raises `ConfigError` for what is no plain value."""
        try:
            call = ast.parse(f"f({self.arguments})", mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError("an argument has no name")
            return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        except (SyntaxError, ValueError) as error:
            raise ConfigError(
                f"the arguments of {self.name} must be names with plain values, as in (size=4, "
                f"style='terse'), got ({self.arguments}): {error}"
            ) from None

    def check_arguments(
        self, signature: inspect.Signature | None = None, *, num_given: int = 0
    ) -> None:
        """Raise `ConfigError` for an argument that is unknown, missing or of another type.

        `signature`: without one, what the text says; `num_given`: arguments that come first.
        """
        values, signature = self.values, signature or self._signature()
        if signature is None:
            return
        every = [*signature.parameters.values()][num_given:]
        known = {each.name: each for each in every if each.kind not in ANY_NAME}
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in every)
        for name, value in values.items():
            kind = known[name].annotation if name in known else EMPTY
            kind = getattr(kind, "__name__", kind)
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            nearest = f"the nearest is {near[0]}, correct or remove it" if near else ""
            rule, remedy = "", nearest or "it takes none, remove it"
            if name not in known and not takes_any:
                rule = "must be given arguments that it takes"
            elif type(value) not in KINDS.get(kind, (type(value),)):
                rule, remedy = f"must be given {name} as {kind}", "write it as one"
            if rule:
                raise ConfigError(f"{self.name} {rule}, got {name}={value!r}: {remedy}")
        for name, each in known.items():
            if each.default is EMPTY and name not in values:
                raise ConfigError(
                    f"{self.name} must be given {name}, got ({self.arguments}): write "
                    f'{{path = "...", {name} = ...}} in a file, or {self.name}({name}=...)'
                )

    def _signature(self) -> inspect.Signature | None:
        """How its class or function is called, by its text; None: that does not say it."""
        body = self._tree().body
        nodes = {getattr(node, "name", ""): node for node in body}
        ours = {
            alias.asname or alias.name
            for node in body
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("async_grpo.")
            for alias in node.names
        }
        names = [self.name.rpartition(":")[2]]
        for name in names:  # which grows
            node = nodes.pop(name, None)  # a class may have the name of what it derives from
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return None if node.decorator_list else _signature_of(node.args)
            if isinstance(node, ast.ClassDef):
                if node.decorator_list:
                    return _fields_of(node) if "dataclass" in ast.unparse(node) else None
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                        return _signature_of(each.args, num_left_out=1)
                names += map(ast.unparse, node.bases)
            elif name not in ours:
                return None
        return inspect.Signature()  # what the package has to derive from takes none

    def make(self, found: Callable[..., T], *given: object) -> T:
        """Call its class, or a function in its place, with what comes first and its arguments."""
        self.check_arguments(inspect.signature(found), num_given=len(given))
        return found(*given, **self.values)

    def check_defined(self) -> None:
        """Raise `ConfigError` for a text that cannot be parsed, or that does not define the name.

        The text is not run: a star import or a change of globals counts as a definition.
        """
        nodes = self._nodes()
        named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        bound = {node.name for node in nodes if isinstance(node, named)}
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

    @property
    def is_coroutine(self) -> bool:
        """Whether the name is that of an `async def`."""
        return self._is(ast.AsyncFunctionDef, self._nodes())

    @property
    def is_function(self) -> bool:
        """Whether the name is that of a `def` that stands in nothing else."""
        return self._is(ast.FunctionDef, self._tree().body)

    def _is(
        self, kind: type[ast.FunctionDef | ast.AsyncFunctionDef], nodes: Iterable[ast.AST]
    ) -> bool:
        name = self.name.rpartition(":")[2]
        return any(isinstance(node, kind) and node.name == name for node in nodes)

    def asks(self, method: str) -> bool:
        """Whether its source names an attribute `method`, of any object."""
        nodes = self._nodes()
        return any(isinstance(node, ast.Attribute) and node.attr == method for node in nodes)

    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self._tree()))

    def _tree(self) -> ast.Module:
        try:
            return ast.parse(self.text, self.place)
        except SyntaxError as error:
            raise ConfigError(f"{self.place} cannot be imported: {error!r}: correct it") from None

    def load(self, base: type[T]) -> type[T]:
        """Run the source, return the class; raises `ConfigError` unless it derives from `base`."""
        found = self.run()
        if not isinstance(found, type) or not issubclass(found, base):
            raise ConfigError(
                f"{self.name} must be a class derived from {base.__name__}, got {found!r}: "
                "correct the file or the name"
            )
        return found

    def run(self) -> object:
        """Run the source, return what has the name, or None; raises `ConfigError` if it cannot."""
        try:
            if self.place.endswith(".py"):
                module = run_file(self.place, self.text)
            else:
                self.require_same(replace(self, text=text_of(self.place)))
                module = importlib.import_module(self.place)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # the user's own code may raise anything
            raise ConfigError(f"{self.place} cannot be imported: {error!r}: correct it") from error
        return getattr(module, self.name.rpartition(":")[2], None)

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


def _signature_of(args: ast.arguments, *, num_left_out: int = 0) -> inspect.Signature:
    """The signature that a definition's arguments make, without the first ones."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(plain) - len(args.defaults)), *args.defaults]
    given = [*zip(plain, defaults, strict=True)][num_left_out:]
    named = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    kinds = inspect.Parameter
    found = [_parameter(arg, default, kinds.POSITIONAL_OR_KEYWORD) for arg, default in given]
    found += [_parameter(args.vararg, None, kinds.VAR_POSITIONAL)] if args.vararg else []
    found += [_parameter(arg, default, kinds.KEYWORD_ONLY) for arg, default in named]
    found += [_parameter(args.kwarg, None, kinds.VAR_KEYWORD)] if args.kwarg else []
    return inspect.Signature(found)


def _fields_of(node: ast.ClassDef) -> inspect.Signature:
    """The signature of a dataclass."""
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    args = [ast.arg(ast.unparse(each.target), each.annotation) for each in fields]
    kind = inspect.Parameter.KEYWORD_ONLY
    pairs = zip(args, fields, strict=True)
    return inspect.Signature([_parameter(arg, each.value, kind) for arg, each in pairs])


def _parameter(arg: ast.arg, default: ast.expr | None, kind: Any) -> inspect.Parameter:
    annotation = ast.unparse(arg.annotation) if arg.annotation else EMPTY
    default_or_none = EMPTY if default is None else default
    return inspect.Parameter(arg.arg, kind, default=default_or_none, annotation=annotation)


def hash_text(text: str, arguments: str = "") -> str:
    """The sha256 of a file's text, and of the arguments that go with it."""
    return hashlib.sha256(
        f"{text}\0({arguments})".encode() if arguments else text.encode()
    ).hexdigest()


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
