"""What the page makes of the texts of models."""

from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts_pages import NEEDS_NODE, called

pytestmark = NEEDS_NODE
PIECES = st.lists(st.sampled_from(["a", "b", " ", "\n", "é", "3.5", ", "]), max_size=30)
TEXTS = PIECES.map("".join)


def joined(side, *, shared=False):
    return "".join(text for text, is_own in side if not (shared and is_own))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=20, max_size=60))
def test_a_difference_is_both_texts_whole_and_what_is_not_marked_is_in_both(pairs):
    for (left, right), (a, b) in zip(
        pairs, called("compare.js", "differences", pairs), strict=True
    ):
        assert (joined(a), joined(b)) == (left, right)
        assert joined(a, shared=True) == joined(b, shared=True)
        assert (left == right) == (not any(is_own for _, is_own in [*a, *b]))


def test_a_difference_is_told_by_words():
    pair = ["the sum is 5, so\nyes", "the sum is 17, so\nyes"]
    [[a, b]] = called("compare.js", "differences", [pair])
    assert [text for text, is_own in a if is_own] == ["5"]
    assert [text for text, is_own in b if is_own] == ["17"]


def test_texts_that_have_little_in_common_cost_no_more_than_their_length():
    texts = [" ".join(f"w{n * step % 7919}" for n in range(40_000)) for step in (3, 5)]
    [[a, b]] = called("compare.js", "differences", [texts])
    assert [joined(a), joined(b)] == texts
