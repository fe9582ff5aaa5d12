"""Functions as tools: what the model is told of them, and what it may write."""

import asyncio
from typing import Annotated, Literal

import pytest
from pydantic import Field

from async_grpo.environments.tools.base import ToolMistake
from async_grpo.environments.tools.function import FunctionTool, tool
from async_grpo.util.errors import ConfigError


@tool
def repeat(word: Annotated[str, Field(description="what to say")], times: int = 2) -> str:
    """Says it several times."""
    return " ".join([word] * times)


def call(function, **arguments):
    return asyncio.run(function.call(arguments))


def test_the_signature_says_what_the_model_may_write():
    assert repeat.spec == {
        "type": "function",
        "function": {
            "name": "repeat",
            "description": "Says it several times.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "what to say"},
                    "times": {"type": "integer"},
                },
                "required": ["word"],
                "additionalProperties": False,
            },
        },
    }


def test_defaults_hold_and_plain_conversions_are_made():
    assert call(repeat, word="a") == "a a"
    assert call(repeat, word="a", times="3") == "a a a"


@pytest.mark.parametrize(
    "arguments", [{}, {"word": 1}, {"word": "a", "times": "many"}, {"word": "a", "loud": True}]
)
def test_arguments_that_do_not_fit_are_the_models_mistake(arguments):
    with pytest.raises(ToolMistake, match="arguments are wrong"):
        call(repeat, **arguments)


def test_async_functions_and_any_json_types_serve():
    @tool
    async def pick(copy: Literal["a", "b"], json: list[int]) -> dict:
        return {copy: json}

    assert call(pick, copy="a", json=[1]) == '{"a": [1]}'


def test_what_a_function_raises_is_not_taken_for_the_models_mistake():
    @tool
    def broken(x: int) -> str:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        call(broken, x=1)
    assert not isinstance(caught.value, ToolMistake)


@pytest.mark.parametrize(
    "function", [lambda x: x, lambda *x: x, lambda **x: x], ids=["untyped", "args", "kwargs"]
)
def test_arguments_without_name_or_type_are_refused(function):
    with pytest.raises(ConfigError, match="name and a type"):
        FunctionTool(function)


def test_types_that_json_lacks_are_refused():
    def take(x: asyncio.Event) -> str:
        return str(x)

    with pytest.raises(ConfigError, match="types that JSON has"):
        FunctionTool(take)
