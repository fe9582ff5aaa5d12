"""Docstrings of attributes: strings below fields, which Python parses and does not keep."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from textwrap import dedent


def attribute_docs(owner: type) -> dict[str, str]:
    """{attribute: the string below it}, of a class and of those it inherits from."""
    docs: dict[str, str] = {}
    for each in reversed(owner.__mro__[:-1]):  # all but `object`
        [tree] = ast.parse(dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for pair in pairwise(tree.body):
            match pair:
                case (
                    ast.Assign(targets=[name]) | ast.AnnAssign(target=name),
                    ast.Expr(ast.Constant(str(text))),
                ):
                    docs[ast.unparse(name)] = " ".join(text.split())
    return docs
