import time

import pytest

from async_grpo.verification.graders.answers import (
    UnscorableError,
    ground_truth,
    last_boxed,
    require_boxed,
)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", r"\boxed{7}"),
        (r"\boxed { x }", "x"),
        (r"\fbox{3}", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"f(x) = { \boxed{5}", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{}", None),
        (r"\boxed{2", None),
        ("boxed{2}", None),
        ("", None),
    ],
)
def test_the_box_that_closes_last_is_found(text, content):
    assert last_boxed(text) == content


def test_a_megabyte_of_open_boxes_takes_linear_time():
    started = time.perf_counter()
    assert last_boxed("\\boxed{" * 150_000) is None
    assert time.perf_counter() - started < 5.0


def test_output_without_a_box_is_unscorable():
    with pytest.raises(UnscorableError, match="answer in the output"):
        require_boxed("the answer is 4")


@pytest.mark.parametrize("answer", ["5", r"\boxed{5}", r"We get \boxed{5}.", 5, " 5 "])
def test_ground_truth_may_be_boxed_or_bare(answer):
    assert ground_truth(answer) == "5"


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_missing_ground_truth_is_an_error_of_the_data(answer):
    with pytest.raises(ValueError, match="`answer` column"):
        ground_truth(answer)
