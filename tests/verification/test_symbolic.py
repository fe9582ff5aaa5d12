"""Expressions are compared as mathematics, exactly, and nothing of a text is evaluated."""

import pytest
import sympy

from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.graders.symbolic import NotMathError, parse_expression, sympy_reward

SAME = [
    ("x+1", "1+x"),
    ("0.25", r"\frac{1}{4}"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\sqrt[3]{27}x", "3x"),
    (r"\frac{a+b}{2}", r"\frac{a}{2}+\frac{b}{2}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("2^{10}x", "1024x"),
    ("1024", "2^{10}"),
    (r"2\pi r", r"r \cdot 2\pi"),
    ("π/2", r"\frac{\pi}{2}"),
    (r"3\frac{1}{2}", "3.5"),
    ("xy", r"y \times x"),
    ("(2/4, 3)", r"(\frac12, 3)"),
    ("1, 2", "1,2"),
    (r"\sin(x)^2 + \cos(x)^2 + x", "1+x"),
    (r"\frac{1}{\sqrt{3}-\sqrt{2}}", r"\sqrt{3}+\sqrt{2}"),
    (r"\sqrt{5+2\sqrt{6}}", r"\sqrt{2}+\sqrt{3}"),
    (r"e^{i\pi}x", "-x"),
    ("(a+b)(a-b)", "a^2-b^2"),
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
    ("y=5", "x=5"),
    ("evil", "live"),  # the same letters
    ("1.0000000000000000000000001", "1"),  # a float would not see it
    ("1.41421356237309504880168872", r"\sqrt{2}"),
    ("x^2", "|x|^2"),
    (r"\sqrt{x^2}", "x"),
    ("x/x", "1"),
    ("10^{-30}x", "0"),
    ("1.5.5", "1.55"),
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
        "((9^{99})^{99})^{99}",
        "2^{3+9999i}",
        "0^{-1} ^ 0^{-1}",
        "sqrt(10^{999})",
        "sin(10^{99})",
        "exp(exp(exp(99)))",
        "9" * 400 + "^{900}",
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
