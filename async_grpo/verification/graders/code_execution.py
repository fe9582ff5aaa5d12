"""Programs as answers: the last fenced block of an output is run on the question's tests.

Programs run in jails (see `jail`). Expected results are compared outside, and never enter a jail
that runs generated code. A program earns 1.0 when it passes every test, else 0.0.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.verification import jail_calls
from async_grpo.verification.graders import TIMEOUT_VARIABLE
from async_grpo.verification.graders.answers import UnscorableError
from async_grpo.verification.jailer import run_program, run_tests

FENCE = re.compile(r"^```[ \t]*([\w+-]*)[ \t]*\r?\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
PYTHON = {"", "python", "py", "python3"}
MAX_SECONDS_A_TEST = 6
MAX_CODE_CHARACTERS = 200_000
Columns = Mapping[str, Any]  # the user's own
DEFAULT_BUDGET_S = 10.0
SHARE_OF_TIMEOUT = 0.8  # so that a slow program is graded as wrong before the verification's limit


@dataclass(frozen=True, slots=True)
class CodeTests:
    """The tests of a program in a question's columns."""

    cases: tuple[tuple[str, str], ...] = ()  # standard input, expected standard output
    checks: tuple[str, ...] = ()  # Python that must not raise
    setup: str = ""  # Python that the checks need
    defines: tuple[str, ...] = ()  # names that the program defines, some maybe those of builtins


def grade_code(output: str, columns: Columns, *, budget_s: float | None = None) -> float:
    """1.0 when the last program of the output passes all tests within the budget, else 0.0.

    `budget_s`: by default `SHARE_OF_TIMEOUT` of the verification's time limit.

    Raises `UnscorableError` without a program, ValueError for columns that hold no tests,
    `JailError` when nothing could be run.
    """
    tests = read_tests(columns)
    program = extract_program(output)
    whole_s = float(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_BUDGET_S))
    budget_s = SHARE_OF_TIMEOUT * whole_s if budget_s is None else budget_s
    deadline = time.monotonic() + budget_s
    return float(
        all(
            time.monotonic() < deadline and _passes_case(program, *case, deadline=deadline)
            for case in tests.cases
        )
        and (not tests.checks or _passes_checks(program, tests, deadline=deadline))
    )


def extract_program(output: str) -> str:
    """The last fenced block of Python, or of no stated language.

    >>> extract_program("First:\\n```python\\nprint(1)\\n```\\nno, better:\\n```\\nprint(2)\\n```")
    'print(2)\\n'
    """
    blocks = [code for language, code in FENCE.findall(output) if language.lower() in PYTHON]
    if not blocks:
        raise UnscorableError("the output holds no fenced block of Python")
    if len(blocks[-1]) > MAX_CODE_CHARACTERS:
        raise UnscorableError(f"the program is longer than {MAX_CODE_CHARACTERS} characters")
    return blocks[-1]


def read_tests(columns: Columns) -> CodeTests:
    """The tests in any of the common forms; raises ValueError when there are none.

    `test_list` with `test_setup_code` (MBPP), `test` with `entry_point` (HumanEval), `input_output`
    with `inputs` and `outputs` (APPS, with `fn_name` too), `tests` of `input` and `output`. Columns
    may hold these as JSON.
    """
    tests = _as_value(_first(columns, "test_list", "input_output", "test_cases", "tests", "test"))
    setup = _join(columns.get("test_setup_code"), columns.get("test_imports"))
    entry = columns.get("entry_point") or columns.get("fn_name") or ""
    defines = (*_defined(columns.get("code")), *([entry] if entry else []))
    if isinstance(tests, str) and entry:
        return CodeTests(checks=(f"{tests}\ncheck({entry})\n",), setup=setup, defines=defines)
    if isinstance(tests, Mapping):
        return _read_apps(tests, setup)
    listed = tests if isinstance(tests, list | tuple) else []
    if listed and all(isinstance(test, str) for test in listed):
        return CodeTests(checks=tuple(listed), setup=setup, defines=defines)
    if listed and all(isinstance(test, Mapping) for test in listed):
        pairs = tuple((_text(test["input"]), _text(test["output"])) for test in listed)
        return CodeTests(cases=pairs)
    raise ValueError(
        "code_execution needs tests in a column test_list, input_output, test_cases, tests, or "
        f"test with entry_point, got {str(tests)[:80]!r}"
    )


def same_output(given: str, expected: str) -> bool:
    """Whether two outputs agree but for blanks at line ends, empty lines at the end, and rounding.

    >>> same_output("1 2 \\n0.3000000001\\n\\n", "1 2\\n0.3")
    True
    """
    ours, theirs = ([line.split() for line in t.rstrip().splitlines()] for t in (given, expected))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _passes_case(program: str, given: str, expected: str, *, deadline: float) -> bool:
    standard_input = given.encode("utf-8", "replace")
    result = run_program(
        program, standard_input, deadline=_until(deadline), cpu_s=MAX_SECONDS_A_TEST
    )
    output = result.output.decode("utf-8", "replace")
    return result.ending == "ended" and same_output(output, expected)


def _passes_checks(program: str, tests: CodeTests, *, deadline: float) -> bool:
    result = run_tests(
        program,
        tests.checks,
        setup=tests.setup,
        defines=tests.defines,
        deadline=_until(deadline),
        cpu_s=MAX_SECONDS_A_TEST,
    )
    if result.ending == "ended" and result.output.startswith(jail_calls.UNABLE):
        raise ValueError(f"a test cannot be run: {result.output.decode('utf-8', 'replace')}")
    return result.ending == "ended" and result.output.startswith(jail_calls.PASSED)


def _until(deadline: float) -> float:
    return min(deadline, time.monotonic() + MAX_SECONDS_A_TEST)


def _read_apps(tests: Columns, setup: str) -> CodeTests:
    inputs, outputs = tests.get("inputs", ()), tests.get("outputs", ())
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            "code_execution needs as many outputs as inputs, and some, got "
            f"{len(inputs)} inputs and {len(outputs)} outputs"
        )
    name = tests.get("fn_name")
    if not name:
        pairs = zip(inputs, outputs, strict=True)
        return CodeTests(cases=tuple((_text(a), _text(b)) for a, b in pairs))
    checks = [
        f"result = {name}(*{tuple(_as_value(i))!r})\n"
        # JSON has no tuples. list() of anything else would make "ab" and {"a": 9, "b": 7} the same.
        f"assert result == {o!r} or [result] == {o!r} or "
        f"isinstance(result, tuple) and list(result) == {o!r}"
        for i, o in zip(inputs, outputs, strict=True)
    ]
    return CodeTests(checks=tuple(checks), setup=setup, defines=(name,))


def _first(columns: Columns, *names: str) -> object:
    return next((columns[name] for name in names if columns.get(name)), None)


def _as_value(value: object) -> Any:
    """The value of a text that is JSON; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _text(value: Iterable[object]) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _join(*parts: str | list[str] | None) -> str:
    return "\n".join("\n".join(part) if isinstance(part, list) else part for part in parts if part)


def _defined(reference: object) -> list[str]:
    """Names of the functions and classes of a reference solution, which a program must define."""
    try:
        body = ast.parse(reference).body if isinstance(reference, str) else []
    except SyntaxError:
        return []
    kinds = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
    return [node.name for node in body if isinstance(node, kinds)]


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    # float() reads more than numbers that programs print: "0_3.0", "nan", digits of other scripts.
    if "." not in expected or not (NUMBER.fullmatch(given) and NUMBER.fullmatch(expected)):
        return False
    return math.isclose(float(given), float(expected), rel_tol=1e-6)
