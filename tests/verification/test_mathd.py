import pytest

from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.graders.mathd import mathd_reward

SAME = [
    ("42", "42"),
    ("$42$", "42"),
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\frac12", "1/2"),
    ("-1/2", r"-\frac{1}{2}"),
    ("0.5", r"\frac{1}{2}"),
    (".25", "0.25"),
    ("5.0", "5"),
    ("5.", "5"),
    ("1,250", "1250"),
    (r"1{,}250", "1250"),
    (r"12 \text{ cm}^2", "12"),
    (r"\text{Monday}", "Monday"),
    (r"30^\circ", "30"),
    (r"30^{\circ}", "30"),
    (r"50\%", r"50\text{ percent}"),
    (r"\$3.50", "3.50"),
    ("x = 7", "7"),
    (r"\left(1, 2\right)", "(1,2)"),
    (r"\sqrt2", r"\sqrt{2}"),
    ("−3", "-3"),
]
DIFFERENT = [
    ("42", "43"),
    ("4", "42"),
    ("1/2", "2/1"),
    ("-5", "5"),
    ("5.01", "5"),
    ("5.05", "5.5"),
    ("(1,200)", "1200"),
    (r"\text{Monday}", "Tuesday"),
    ("x+1", "1+x"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("100.000", "1"),
    (r"50\%", "50"),
]


@pytest.mark.parametrize(("given", "expected"), SAME)
def test_answers_that_differ_in_spelling_only_are_right(given, expected):
    assert mathd_reward(f"thus \\boxed{{{given}}}", expected) == 1.0
    assert mathd_reward(f"thus \\boxed{{{expected}}}", f"\\boxed{{{given}}}") == 1.0


@pytest.mark.parametrize(("given", "expected"), DIFFERENT)
def test_other_answers_are_wrong(given, expected):
    assert mathd_reward(f"thus \\boxed{{{given}}}", expected) == 0.0


def test_only_the_last_box_counts():
    assert mathd_reward(r"\boxed{1} \boxed{2}", "1") == 0.0


def test_an_answer_outside_a_box_is_unscorable():
    with pytest.raises(UnscorableError):
        mathd_reward("The answer is 42", "42")
