import pytest
import sympy

from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.graders.expression import NotMathError, parse_expression
from async_grpo.verification.graders.symbolic import sympy_reward

SAME = [
    ("x+1", "1+x"),
    ("0.25", r"\frac{1}{4}"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\sqrt[3]{27}", "3"),
    (r"\frac{a+b}{2}", r"\frac{a}{2}+\frac{b}{2}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("2^{10}", "1024"),
    (r"2\pi r", r"r \cdot 2\pi"),
    ("π/2", r"\frac{\pi}{2}"),
    (r"3\frac{1}{2}", "3.5"),
    ("xy", r"y \times x"),
    ("(2/4, 3)", r"(\frac12, 3)"),
    ("1, 2", "1,2"),
    (r"\sin(x)^2 + \cos(x)^2", "1"),
    ("e^{2}", "e^2"),
    ("1,000", "10^3"),
    (r"[1, 2)", r"[1,2)"),
    (r"\text{no solution}", "no solution"),
]
DIFFERENT = [
    ("2", "3"),
    (r"\frac{a+b}{2}", r"a+\frac{b}{2}"),
    ("x^{10}", "10x"),
    ("x^{a+b}", "x^a+b"),
    ("(1, 2)", "(2, 1)"),
    ("(1, 2)", "(1, 2, 3)"),
    ("(1, 2)", "1"),
    ("[1,2)", "(1,2)"),
    ("1/0", "2/0"),
    ("x", "y"),
    ("3.14", r"\pi"),
    ("", "0"),
    ("apple", "orange"),
]


@pytest.mark.parametrize(("given", "expected"), SAME)
def test_equal_expressions_are_right(given, expected):
    assert sympy_reward(f"\\boxed{{{given}}}", expected) == 1.0


@pytest.mark.parametrize(("given", "expected"), DIFFERENT)
def test_unequal_expressions_are_wrong(given, expected):
    assert sympy_reward(f"\\boxed{{{given} }} \\boxed{{{given or '?'}}}", expected) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "os.system",
        "().__class__",
        "lambda: 1",
        "[x for x in y]",
        "9^9^9^9",
        "2^1001",
        "(" * 400,
        "-" * 499,
        "9" * 501,
        r"\input{secrets}",
        "1 2",
        "x==1",
        "",
    ],
)
def test_what_is_not_an_expression_is_refused_without_evaluating_it(text):
    with pytest.raises(NotMathError):
        parse_expression(text)


def test_decimals_are_exact():
    assert parse_expression("0.1") == sympy.Rational(1, 10)


def test_no_box_is_unscorable():
    with pytest.raises(UnscorableError):
        sympy_reward("x+1", "x+1")
