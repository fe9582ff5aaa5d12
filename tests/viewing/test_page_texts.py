"""What the page makes of the texts of models."""

import re
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts_pages import NEEDS_NODE, called

pytestmark = NEEDS_NODE
PIECES = st.lists(st.sampled_from(["a", "b", " ", "\n", "é", "3.5", ", "]), max_size=30)
TEXTS = PIECES.map("".join)
MARKUP = st.lists(
    st.sampled_from([
        "word", "zwei", "x", " ", "\n", "\n\n", "*", "**", "***", "_", "__", "~~", "`", "```",
        "$", "# ", "- ", "  - ", "1. ", "> ", "|", "\n|-|-|\n", "<b>", "</script>",
        "[a](javascript:b)", "\\", "3.5", "onerror=", "&lt;", "'", '"',
    ]),
    max_size=40,
).map("".join)  # fmt: skip
FORMULA = st.lists(
    st.sampled_from([
        "x", "y", "2", "^", "_", "{", "}", "&", "\\\\", "\\frac", "\\sqrt", "[", "]", "\\left",
        "\\right", "(", ")", "\\begin{pmatrix}", "\\end{pmatrix}", "\\text", "\\mathbb", "\\sum",
        "\\evil", "\\constructor", "'", "\\not", "\\overset", "<script>", "\\toString",
        "\\__proto__", " ", "\\href", "\\style",
    ]),
    max_size=25,
).map("".join)  # fmt: skip
ELEMENTS = {
    "p", "h4", "h5", "h6", "ul", "ol", "li", "pre", "code", "blockquote", "table", "tbody", "tr",
    "th", "td", "strong", "em", "del", "br", "hr", "span", "div", "math", "mrow", "mi", "mn", "mo",
    "mtext", "mspace", "msup", "msub", "msubsup", "mover", "munder", "munderover", "mfrac",
    "msqrt", "mroot",
    "mtable", "mtr", "mtd",
}  # fmt: skip


def content(tree):
    return tree if isinstance(tree, str) else "".join(map(content, tree[2:]))


def parts(tree):
    """Every element of a tree."""
    if not isinstance(tree, str):
        yield tree
        for child in tree[2:]:
            yield from parts(child)


def letters(text):
    return re.findall(r"[a-z]", text)


def as_markup(tree):
    """Compact: attributes are left out."""
    if isinstance(tree, str):
        return tree
    return f"<{tree[0]}>{''.join(map(as_markup, tree[2:]))}</{tree[0]}>"


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


@settings(max_examples=15, deadline=None)
@given(st.lists(MARKUP, min_size=20, max_size=60))
def test_markdown_loses_no_letter_and_makes_known_elements_alone(texts):
    found = called("markdown.js", "markdownOf", [[text] for text in texts])
    for text, trees in zip(texts, found, strict=True):
        plain = re.sub(r"\\\W", "", text)
        assert letters("".join(map(content, trees))) == letters(plain), (text, trees)
        assert {part[0] for tree in trees for part in parts(tree)} <= ELEMENTS


@settings(max_examples=15, deadline=None)
@given(st.lists(FORMULA, min_size=20, max_size=60))
def test_a_formula_is_elements_of_mathml_or_its_source(formulas):
    for tree in called("math.js", "mathOf", [[formula, True] for formula in formulas]):
        for name, attributes, *children in parts(tree) if tree else ():
            assert name in ELEMENTS
            assert not any("x" in value for value in attributes.values()), "a text of the model"
            assert None not in children


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (r"\frac{1}{2}", "<mfrac><mn>1</mn><mn>2</mn></mfrac>"),
        (r"\frac12", "<mfrac><mn>1</mn><mn>2</mn></mfrac>"),
        ("x_1^2", "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>"),
        ("f''", "<msup><mi>f</mi><mrow><mo>′</mo><mo>′</mo></mrow></msup>"),
        (r"\sum_{i}^n i", "<munderover><mo>∑</mo><mi>i</mi><mi>n</mi></munderover><mi>i</mi>"),
        (r"\sqrt[3]{8}", "<mroot><mn>8</mn><mn>3</mn></mroot>"),
        (r"\text{if } \mathbb{R}", "<mtext>if </mtext><mi>ℝ</mi>"),
        (r"a \ne b", "<mi>a</mi><mo>≠</mo><mi>b</mi>"),
        (r"\href{x}", r"<mtext>\href</mtext><mi>x</mi>"),
        (r"a & b \\ c", "<mtable><mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr><mtr><mtd>"
         "<mi>c</mi></mtd></mtr></mtable>"),
        (r"\left( x", None), ("}", None), (r"\begin{evil}x\end{evil}", None),
        ("{" * 100 + "}" * 100, None),
        ("x" * 20_001, None),
    ],
)  # fmt: skip
def test_formulas_are_read_as_latex_reads_them(source, expected):
    [tree] = called("math.js", "mathOf", [[source, False]])
    assert expected == (tree and as_markup(tree[2])[len("<mrow>") : -len("</mrow>")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A\nb", "<h4>A</h4><p>b</p>"),
        ("1. a\n   - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
        ("```py\n**a**\n```", "<pre><span>py</span><code>**a**</code></pre>"),
        ("snake_case_name, 2 * 3 * 4", "<p>snake_case_name, 2 * 3 * 4</p>"),
        ("it costs $5 and $6", "<p>it costs $5 and $6</p>"),
        ("so $x$ and \\(y\\)", "<p>so <math><mrow><mi>x</mi></mrow></math> and "
         "<math><mrow><mi>y</mi></mrow></math></p>"),
        ("$\\left( x$", "<p><code>$\\left( x$</code></p>"),
        ("\\boxed{7}", "<p><math><mrow><mrow><mn>7</mn></mrow></mrow></math></p>"),
        ("[a](javascript:b) ![c](d)", "<p>[a](javascript:b) ![c](d)</p>"),
        ("| a | b |\n|---|---|\n| 1 | 2 |", "<table><tbody><tr><th>a</th><th>b</th></tr><tr>"
         "<td>1</td><td>2</td></tr></tbody></table>"),
    ],
)  # fmt: skip
def test_markdown_is_read_as_models_write_it(text, expected):
    [trees] = called("markdown.js", "markdownOf", [[text]])
    assert "".join(map(as_markup, trees)) == expected


@pytest.mark.parametrize(
    "text",
    [("*a **b " * 7000 + "\n\n") * 4, "_a " * 16_000, "\\(" * 25_000, "\\boxed{" * 7000,
     "`a``b```" * 6000, ">" * 50_000, "- a\n\n" * 10_000, "$$\nx\n" * 20_000,
     "|" * 20_000 + "\n|-|\n" + "|" * 20_000],
)  # fmt: skip
def test_texts_made_to_be_slow_are_formatted_within_a_second(text):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    called("markdown.js", "markdownOf", [[text]])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1.5  # node's start too
