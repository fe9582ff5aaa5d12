from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.graders.countdown import grade_countdown, parse_equation

SOLVED, WELL_FORMED, MALFORMED = (1.0, 1.0), (0.1, 1.0), (0.0, 0.0)


def grade(output, *, numbers=(2, 9, 8), target=15):
    result = grade_countdown(output, numbers=numbers, target=target)
    return result.reward, result.format_reward


@pytest.mark.parametrize(
    "output",
    [
        "8-2+9=15",
        "8-2+9",
        "  8 - 2 + 9 = 15  \n\n",
        "9-(2-8)=15",
        "-2+9+8",
        "9+8*2=25\n8-2+9=15",
        r"so \boxed{8-2+9}",
        r"\boxed{1+1} \boxed{$8-2+9 = 15$}",
        "<answer>8-2+9</answer>",
        "<answer>1</answer> no <answer> 8-2+9 = 15 </answer> done",
        r"\boxed{1} <answer>8-2+9</answer> 1+1",
        "8−2+9 = 15.",
    ],
)
def test_a_solution_earns_one(output):
    assert grade(output) == SOLVED


@pytest.mark.parametrize(
    "output",
    [
        "8+2+9=19",  # another value
        "8-2-9=15",  # a false claim, and another value
        "8-2+9=16",  # the value is hit, the claim is false
        "8+9",  # a number is left over
        "8",
        "8-2+9=15\n9+8",  # the last line counts
        "<answer>8-2+9</answer> <answer>8+9</answer>",
    ],
)
def test_a_well_formed_line_with_the_wrong_value_earns_a_tenth(output):
    assert grade(output) == WELL_FORMED


@pytest.mark.parametrize(
    "output",
    [
        "15",  # no given number
        "8-2+9+0",  # a number that was not given
        "8-2+9*1",
        "8+8-1",  # a number used twice
        "82-9",  # digits put together
        "8-2+9=15=15",
        "15=8-2+9",
        "8-2+9=",
        "8 2 9",
        "2(8)+9",
        "8-2+9 is the answer",
        "8-2+9; 0",
        "8--+9",
        "(8-2+9",
        "8-2+9)",
        "08-2+9",
        "8.0-2+9",
        "8**2-9",
        "8//2+9",
        "8_0-2+9",
        "8-2+9 # 15",
        "٨-٢+٩",  # digits, but not ASCII
        "８-2+9",
        "()",
        "(8,2,9)",
        "9**9**9**9",
        "__import__('os').system('true')",
        "(" * 10_000 + "8" + ")" * 10_000,
        "9" * 1_000_000,
        "-" * 499 + "8",
        "8" + "-2" * 5_000,
        "<answer></answer>",
    ],
)
def test_anything_else_earns_nothing(output):
    assert grade(output) == MALFORMED


@pytest.mark.parametrize("output", ["", " \n \n"])
def test_an_empty_output_is_unscorable_and_not_well_formed(output):
    with pytest.raises(UnscorableError) as caught:
        grade(output)
    assert caught.value.format_reward == 0.0


def test_division_is_exact_and_by_zero_only_wrong():
    assert grade("8/(3-8/3)", numbers=(8, 3, 8, 3), target=24) == SOLVED
    assert grade("1/3*3", numbers=(1, 3, 3), target=1) == SOLVED
    assert grade("5/(2-2)", numbers=(5, 2, 2), target=5) == WELL_FORMED


def test_latex_signs_are_signs():
    assert grade(r"\boxed{6 \times 4 \div 2}", numbers=(6, 4, 2), target=12) == SOLVED


def test_a_number_given_twice_is_used_twice():
    assert grade("5+5", numbers=(5, 5), target=10) == SOLVED
    assert grade("5", numbers=(5, 5), target=5) == WELL_FORMED


def test_megabytes_of_open_tags_take_linear_time():
    assert grade("<answer>" * 200_000) == MALFORMED


@st.composite
def expressions(draw):
    """A random expression, its numbers, and its value by construction."""
    leaves = draw(st.lists(st.integers(1, 99), min_size=1, max_size=6))
    parts = [(str(leaf), Fraction(leaf)) for leaf in leaves]
    while len(parts) > 1:
        (left, x), (right, y) = parts.pop(), parts.pop()
        signs = "+-*/" if y else "+-*"
        sign = draw(st.sampled_from(signs))
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else x}[sign]
        parts.insert(0, (f"({left}{sign}{right})", value))
    return parts[0][0], leaves, parts[0][1]


@given(expressions())
def test_every_expression_has_its_value_and_its_numbers(case):
    text, leaves, value = case
    equation = parse_equation(text)
    assert equation.value == value
    assert sorted(equation.numbers) == sorted(leaves)
    if value.denominator == 1:
        assert grade(f"{text} = {value}", numbers=leaves, target=int(value)) == SOLVED


@given(st.text(alphabet="0123456789+-*/()=. <>answer\\boxed{}\n", max_size=60))
def test_no_text_does_worse_than_earn_nothing(text):
    try:
        assert grade(text)[0] in (0.0, 0.1, 1.0)
    except UnscorableError:
        assert not text.strip()
