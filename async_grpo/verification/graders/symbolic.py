"""Equality of answers as mathematics: exact for fractions, else to 30 digits at fixed points.

Nothing is simplified: one line of text can keep a computer algebra system busy for ever. Two
expressions that agree at points chosen beforehand count as the same expression.

LaTeX --pylatexenc--> plain text --tokens--> explicit products --ast--> sympy

The text is parsed and never evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence

import sympy
from pylatexenc.latexwalker import (
    LatexCharsNode,
    LatexGroupNode,
    LatexMacroNode,
    LatexMathNode,
    LatexNode,
    LatexWalker,
    LatexWalkerParseError,
)

from async_grpo.verification.graders.answers import UnscorableError, ground_truth, require_boxed
from async_grpo.verification.graders.countdown import OPERATORS
from async_grpo.verification.graders.limits import cost, is_word, is_worked_out
from async_grpo.verification.graders.mathd import cannot_be, clean, normalise

NUM_DIGITS = 50
MAX_CHARACTERS = 500  # longer answers are compared as strings only
MAX_EXPONENT = 1000
MAX_ARGUMENT = 10**6  # of a function: the cost of reducing an angle grows with it
MAX_BITS = 4000  # of a power's numerator or denominator
TOLERANCE = sympy.Float(10, NUM_DIGITS) ** -30
# Irrational, of both signs, and small: powers of powers stay small too.
POINTS = tuple(
    tuple(sympy.sqrt(prime) / divisor for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37))
    for divisor in (5, -7, 11)
)
FUNCTIONS: dict[str, Callable[..., object]] = {
    name: getattr(sympy, name) for name in ("sqrt", "sin", "cos", "tan", "exp", "log", "ln")
}
CONSTANTS = {"pi": sympy.pi, "oo": sympy.oo, "e": sympy.E, "i": sympy.I}
MACROS = {"pi": " pi ", "infty": " oo ", "cdot": "*", "times": "*", "div": "/"} | {
    name: f" {name}" for name in FUNCTIONS if name != "sqrt"
}
SYMBOLS = {"π": " pi ", "∞": " oo ", "√": " sqrt", "·": "*", "×": "*", "÷": "/", "^": "**"}
TOKEN = re.compile(r"\s*(\d+\.?\d*|\.\d+|[A-Za-z]+|\*\*|[-+*/(),])\s*", re.ASCII)
MIXED_NUMBER = re.compile(r"(?<![\d.])(\d+)\s*\\frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)(\d))")


class NotMathError(ValueError):
    """A text that is not an expression this file understands."""


def sympy_reward(output: str, answer: object) -> float:
    r"""1.0 when the last `\boxed{}` of the output equals `answer` symbolically, else 0.0.

    Raises `UnscorableError` without a `\boxed{}` or when its content takes too long to compute,
    ValueError without an answer to compare with.

    >>> sympy_reward(r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt 2")
    1.0
    """
    expected, given = ground_truth(answer), require_boxed(output)
    if cannot_be(given, expected=expected):
        return 0.0
    if normalise(given) == normalise(expected):
        return 1.0
    if reason := cost(given, expected=expected):
        raise UnscorableError(f"not computed: {reason}")
    if is_word(expected) or not is_worked_out(given, expected=expected):
        return 0.0
    try:
        return float(_same(parse_expression(clean(given)), parse_expression(clean(expected))))
    except NotMathError:
        return 0.0


def _same(left: sympy.Basic, right: sympy.Basic) -> bool:
    if isinstance(left, sympy.Tuple) or isinstance(right, sympy.Tuple):
        both = isinstance(left, sympy.Tuple) and isinstance(right, sympy.Tuple)
        return both and len(left) == len(right) and all(map(_same, left, right))
    if left == right:
        return bool(left != sympy.nan and left != sympy.zoo)
    if left.is_Rational and right.is_Rational:
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if len(symbols) > len(POINTS[0]):
        return False
    points = POINTS if symbols else POINTS[:1]
    return all(_agree(left, right, dict(zip(symbols, point, strict=False))) for point in points)


def _agree(left: sympy.Basic, right: sympy.Basic, point: Mapping[object, object]) -> bool:
    """Whether the values at a point are finite and equal to 30 digits."""
    try:
        one, other = (side.evalf(NUM_DIGITS, subs=point) for side in (left, right))
        if not (one.is_number and other.is_number and one.is_finite and other.is_finite):
            return False
        scale = max(abs(one), abs(other), TOLERANCE)
        return bool(abs((one - other).evalf(NUM_DIGITS)) <= TOLERANCE * scale)
    except (ArithmeticError, TypeError, ValueError):  # no number there
        return False


def parse_expression(text: str) -> sympy.Basic:
    """The expression, or the tuple of expressions, that `text` writes; raises `NotMathError`."""
    if len(text) > MAX_CHARACTERS:
        raise NotMathError(f"longer than {MAX_CHARACTERS} characters")
    mixed = MIXED_NUMBER.sub(r"(\1+(\2\4)/(\3\5))", text)
    try:
        nodes = LatexWalker(mixed, tolerant_parsing=False).get_latex_nodes()[0]
        tree = ast.parse(_explicit(_plain(nodes)), mode="eval")
        return _build(tree.body)
    except (ArithmeticError, RecursionError, SyntaxError, LatexWalkerParseError) as error:
        raise NotMathError(f"not an expression: {error}") from error
    except (TypeError, ValueError) as error:  # sympy: an order of complex numbers, 1/0 in a root
        raise NotMathError(f"not a number: {error}") from error


def _plain(nodes: Sequence[LatexNode | None]) -> str:
    """LaTeX nodes as plain text in which groups keep their parentheses."""
    return "".join(_plain_node(node) for node in nodes if node is not None)


def _plain_node(node: LatexNode) -> str:
    if isinstance(node, LatexCharsNode):
        return "".join(SYMBOLS.get(character, character) for character in node.chars)
    if isinstance(node, LatexGroupNode):
        return f"({_plain(node.nodelist)})"
    if isinstance(node, LatexMathNode):
        return _plain(node.nodelist)
    if isinstance(node, LatexMacroNode):
        return _plain_macro(node)
    raise NotMathError(f"not an expression: {node.latex_verbatim()}")


def _plain_macro(node: LatexMacroNode) -> str:
    given = node.nodeargd.argnlist if node.nodeargd else ()
    arguments = [_plain([argument]) for argument in given]
    if node.macroname == "frac":
        numerator, denominator = arguments
        return f"(({numerator})/({denominator}))"
    if node.macroname == "sqrt":
        index, radicand = arguments
        return f"(({radicand})**(1/({index.strip('[]') or 2})))"
    if node.macroname in MACROS:
        return MACROS[node.macroname]
    raise NotMathError(f"unknown command \\{node.macroname}")


def _explicit(text: str) -> str:
    """Plain text in Python's grammar, with every product written out.

    >>> _explicit("2xy(x+1)")
    '2*x*y*(x+1)'
    """
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise NotMathError(f"unexpected {text[position]!r}")
        word, position = match.group(1), match.end()
        known = not word.isalpha() or word in FUNCTIONS or word in CONSTANTS
        for token in [word] if known else list(word):
            if tokens and _ends_value(tokens[-1]) and _starts_value(token):
                if _is_number(tokens[-1]) and _is_number(token):
                    raise NotMathError(f"two numbers in a row: {tokens[-1]} {token}")
                tokens.append("*")
            tokens.append(token)
    return "".join(map(_exact, tokens))


def _exact(token: str) -> str:
    """A decimal as a fraction: Python would round it, and refuses leading zeros."""
    whole, _, decimals = token.partition(".")
    if not _is_number(token):
        return token
    number = (whole + decimals).lstrip("0") or "0"
    return f"({number}/1{'0' * len(decimals)})" if decimals else number


def _ends_value(token: str) -> bool:
    return token == ")" or _is_number(token) or (token.isalpha() and token not in FUNCTIONS)


def _starts_value(token: str) -> bool:
    return token == "(" or _is_number(token) or token.isalpha()


def _is_number(token: str) -> bool:
    return token[0].isdigit() or token[0] == "."


def _build(node: ast.AST) -> sympy.Basic:
    match node:
        case ast.Constant(value=int() as value):
            return sympy.Integer(value)
        case ast.Name(id=name):
            return CONSTANTS.get(name) or sympy.Symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _build(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_build(left), _build(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_build(left), _build(right))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](_small(_build(argument), bound=MAX_ARGUMENT))
        case ast.Tuple(elts=elements):
            return sympy.Tuple(*map(_build, elements))
    raise NotMathError(f"not an expression: {ast.dump(node)[:80]}")


def _power(base: sympy.Basic, exponent: sympy.Basic) -> sympy.Basic:
    _small(exponent, bound=MAX_EXPONENT)
    if base.is_Rational and exponent.is_Rational:
        num_bits = max(base.p.bit_length(), base.q.bit_length())
        if num_bits * max(1, abs(exponent)) > MAX_BITS:
            raise NotMathError(f"a number of more than {MAX_BITS} bits")
    return base**exponent


def _small(value: sympy.Basic, *, bound: int) -> sympy.Basic:
    """The value; raises `NotMathError` for a number whose size exceeds `bound`."""
    if value.is_number and not abs(value.evalf(15)) <= bound:
        raise NotMathError(f"a number beyond {bound}")
    return value
