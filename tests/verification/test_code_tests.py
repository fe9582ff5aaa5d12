import json

import pytest

from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.graders.code_execution import (
    CodeTests,
    extract_program,
    read_tests,
    same_output,
)


@pytest.mark.parametrize(
    ("output", "program"),
    [
        ("```python\nx\n```", "x\n"),
        ("```\nx\n```", "x\n"),
        ("```py\r\nx\n```", "x\n"),
        ("```python\na\n```\nor\n```Python3\nb\n```\ndone", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```python\ns = '''\n  ```\n'''\n```", "s = '''\n  ```\n'''\n"),
    ],
)
def test_the_last_block_of_python_is_the_program(output, program):
    assert extract_program(output) == program


@pytest.mark.parametrize("output", ["", "print(1)", "```python\nnever closed", "```bash\nls\n```"])
def test_an_output_without_a_program_is_unscorable(output):
    with pytest.raises(UnscorableError):
        extract_program(output)


@pytest.mark.parametrize(
    ("columns", "tests"),
    [
        ({"test_list": ["assert f(1) == 2"]}, CodeTests(checks=("assert f(1) == 2",))),
        (
            {
                "test_list": ["assert sum(1) == 2"],
                "code": "def sum(a): pass",
                "test_setup_code": "a",
            },
            CodeTests(checks=("assert sum(1) == 2",), setup="a", defines=("sum",)),
        ),
        (
            {"test": "def check(f): assert f(1)", "entry_point": "g"},
            CodeTests(checks=("def check(f): assert f(1)\ncheck(g)\n",), defines=("g",)),
        ),
        (
            {"input_output": json.dumps({"inputs": ["1\n", ["2", "3"]], "outputs": ["4", "5\n"]})},
            CodeTests(cases=(("1\n", "4"), ("2\n3", "5\n"))),
        ),
        ({"tests": [{"input": "1", "output": "2"}]}, CodeTests(cases=(("1", "2"),))),
        ({"test_cases": '[{"input": "1", "output": "2"}]'}, CodeTests(cases=(("1", "2"),))),
    ],
)
def test_every_common_form_of_tests_is_read(columns, tests):
    assert read_tests(columns) == tests


@pytest.mark.parametrize(
    "columns",
    [{}, {"tests": []}, {"tests": "print"}, {"input_output": {"inputs": ["1"], "outputs": []}}],
)
def test_a_question_without_tests_is_told_of(columns):
    with pytest.raises(ValueError, match="code_execution needs"):
        read_tests(columns)


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1  2 \n\n", "1 2", True),
        ("0.1000000001", "0.1", True),
        ("1 2", "1\n2", False),
        ("", "1", False),
        ("1", "", False),
        ("1.0", "1", False),
        ("nan", "0.5", False),
        ("0.1001", "0.1", False),
        ("yes", "no", False),
        ("1\n2\n3", "1\n2", False),
    ],
)
def test_outputs_agree_up_to_blanks_and_rounding(given, expected, same):
    assert same_output(given, expected) == same


def passes(result, expected):
    """Whether the check of a function that returns `result` lets it pass."""
    columns = {"input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [expected]}}
    (check,) = read_tests(columns).checks
    try:
        exec(check, {"f": lambda argument: result})
    except AssertionError:
        return False
    return True


def test_only_a_tuple_stands_for_the_list_that_json_made_of_it():
    for result in (["a", "b"], ("a", "b")):
        assert passes(result, ["a", "b"])
    for result in ("ab", {"a": 9, "b": 7}, {"a", "b"}, b"ab", ["ab"], ["b", "a"], iter("ab")):
        assert not passes(result, ["a", "b"])
    assert passes(5, [5]) and passes(5, 5) and passes({"a": 1}, {"a": 1})


@pytest.mark.parametrize("number", ["3", "3.0", "+3.", "0.3e1", "03.00", "3.0000001"])
def test_a_number_may_be_printed_as_programs_do(number):
    assert same_output(number, "3.0")


@pytest.mark.parametrize("word", ["0_3.0", "3_0e-1", "３.0", "3.0f", "0x3.0", "3,0", "nan", "3.1"])
def test_what_only_float_reads_is_no_number(word):
    assert not same_output(word, "3.0")
    assert not same_output("inf", "1.0e999") and not same_output("nan", "nan.")
