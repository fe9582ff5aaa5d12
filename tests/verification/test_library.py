import pytest

from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.graders.math_verify import math_verify_reward


@pytest.mark.parametrize(
    ("output", "answer", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{x+1}", r"\boxed{1+x}", 1.0),
        (r"So $\{1, 2\}$ it is: \boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        ("The answer is 42.", "$42$", 1.0),
        (r"\boxed{43}", "42", 0.0),
        (r"first 42, then \boxed{43}", "42", 0.0),
        (r"\boxed{-5}", "5", 0.0),
        (r"\boxed{x}", "y", 0.0),
    ],
)
def test_math_verify_golden_table(output, answer, reward):
    assert math_verify_reward(output, answer) == reward


def test_output_without_any_answer_is_unscorable():
    with pytest.raises(UnscorableError, match="no answer"):
        math_verify_reward("I do not know", "42")


def test_missing_ground_truth_is_an_error():
    with pytest.raises(ValueError, match="answer"):
        math_verify_reward(r"\boxed{1}", None)
