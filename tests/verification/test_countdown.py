"""Countdown answers against golden rows, brute force and whatever a model writes instead."""

import itertools
import random
from fractions import Fraction

import effort
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


def trees(numbers):
    """Every expression over the numbers in this order, fully bracketed, with its exact value."""
    if len(numbers) == 1:
        yield str(numbers[0]), Fraction(numbers[0])
    for split in range(1, len(numbers)):
        for (left, x), (right, y) in itertools.product(
            trees(numbers[:split]), trees(numbers[split:])
        ):
            yield f"({left}+{right})", x + y
            yield f"({left}-{right})", x - y
            yield f"({left}*{right})", x * y
            if y:
                yield f"({left}/{right})", x / y


@pytest.mark.parametrize(
    "numbers", [(3, 8, 8), (2, 9, 8), (1, 5, 5, 5), (3, 3, 8, 8), (1, 2, 7, 9)]
)
def test_exactly_the_expressions_that_brute_force_finds_are_solutions(numbers):
    found = [
        tree for order in sorted(set(itertools.permutations(numbers))) for tree in trees(order)
    ]
    rng = random.Random(0)
    sample = found if effort.FULL else rng.sample(found, min(len(found), 600))
    whole = [value for _, value in sample if value.denominator == 1]
    for text, value in sample:
        target = rng.choice([value if value.denominator == 1 else 24, rng.choice(whole)])
        spaced = text[1:-1].replace("*", r" \times ").replace("-", "−")
        expected = SOLVED if value == target else WELL_FORMED
        assert grade(spaced, numbers=numbers, target=int(target)) == expected
        assert grade(f"{text} = {target}", numbers=numbers, target=int(target)) == expected
    assert len(whole) > 20


def test_a_value_next_to_the_target_does_not_hit_it():
    """In floating point 3 / (1/3) - 9 is 0 and 10**16 + 1 is 10**16."""
    big = 10**16
    assert grade(f"{big}+1", numbers=(big, 1), target=big) == WELL_FORMED
    assert grade("1/49*49", numbers=(1, 49, 49), target=1) == SOLVED
    assert grade("8/3*3", numbers=(8, 3, 3), target=8) == SOLVED
    assert grade("8/(3*3)", numbers=(8, 3, 3), target=1) == WELL_FORMED


@pytest.mark.parametrize("numbers", [["2", "9", "8"], [2.0, 9.0, 8.0], (8, 9, 2)])
@pytest.mark.parametrize("target", [15, 15.0, "15", "15.0", " 15 "])
def test_the_data_may_write_its_numbers_as_it_likes(numbers, target):
    assert grade("8-2+9=15", numbers=numbers, target=target) == SOLVED
    assert grade("8+2+9=19", numbers=numbers, target=target) == WELL_FORMED
    assert grade("8-2+9+9=15", numbers=numbers, target=target) == MALFORMED


@pytest.mark.parametrize(
    "wrong", [None, "", "x", 1.5, "1/2", True, float("nan"), float("inf"), [1]]
)
def test_data_that_is_no_whole_number_is_an_error_and_no_reward(wrong):
    with pytest.raises(ValueError, match="must be whole"):
        grade("8-2+9=15", target=wrong)
    with pytest.raises(ValueError, match="must be whole"):
        grade("8-2+9=15", numbers=[2, 9, wrong])


def test_an_answer_that_only_repeats_the_target_earns_nothing():
    for text in ("15", "=15", "15=15", "<answer>15</answer>", r"\boxed{15}", "8-2+9 -> 15"):
        assert grade(text) == MALFORMED
    assert grade("15", numbers=(15, 2, 8), target=15) == WELL_FORMED  # a number that was given


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
