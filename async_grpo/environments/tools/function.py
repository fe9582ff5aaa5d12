"""A Python function as a tool: the types of its arguments decide what the model may write.

@tool
def divide(dividend: int, divisor: int) -> str:
    '''The quotient of two whole numbers.'''
    if not divisor:
        raise ToolMistake("nothing is divided by zero")
    return str(dividend / divisor)
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NotRequired, get_type_hints, overload

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from async_grpo.environments.chat.messages import tool_spec
from async_grpo.environments.tools.base import ToolMistake
from async_grpo.util.errors import ConfigError

MAX_THREADS = 32  # of one tool; a call that never returns keeps its thread


@overload
def tool(function: Callable[..., object]) -> FunctionTool: ...
@overload
def tool(*, is_idempotent: bool) -> Callable[[Callable[..., object]], FunctionTool]: ...
def tool(function: Callable[..., object] | None = None, *, is_idempotent: bool = False) -> object:
    """The decorator of a function that a model may call; `is_idempotent`: see `base.Tool`."""
    if function is None:
        return partial(FunctionTool, is_idempotent=is_idempotent)
    return FunctionTool(function)


class FunctionTool:
    """See `base.Tool`; a function that is not async runs in a thread.

    Raises `ConfigError` for a function whose arguments have no types, or no names.
    """

    def __init__(self, function: Callable[..., object], *, is_idempotent: bool = False) -> None:
        self.is_idempotent = is_idempotent
        self._function = function
        self._arguments = _arguments_of(function)
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=function.__name__)
        parameters = _without_titles(self._arguments.json_schema())
        self.spec = tool_spec(function.__name__, inspect.getdoc(function) or "", parameters)

    async def call(self, arguments: Mapping[str, object]) -> str:
        """See `Tool`."""
        try:
            given = self._arguments.validate_python(dict(arguments))
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ToolMistake(f"the arguments are wrong: {'; '.join(wrong)}") from error
        if inspect.iscoroutinefunction(self._function):
            answer = await self._function(**given)
        else:
            work = partial(self._function, **given)
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        return answer if isinstance(answer, str) else json.dumps(answer)


def _arguments_of(function: Callable[..., object]) -> TypeAdapter[dict[str, object]]:
    """What validates the arguments of a call; names that the function does not have are refused."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, object] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if name not in hints or not is_named:
            raise ConfigError(
                f"every argument of a tool must have a name and a type, got {parameter} of "
                f"{function.__qualname__}: annotate it"
            )
        is_needed = parameter.default is parameter.empty
        fields[name] = hints[name] if is_needed else NotRequired[hints[name]]
    try:
        # Before Python 3.12 pydantic reads only the TypedDict of typing_extensions.
        arguments = TypedDict(function.__name__, fields)  # type: ignore[misc]
        closed: Any = with_config(ConfigDict(extra="forbid"))(arguments)
        return TypeAdapter(closed)
    except PydanticUserError as error:
        raise ConfigError(
            f"the arguments of the tool {function.__qualname__} must be of types that JSON has: "
            f"{error.message}"
        ) from error


def _without_titles(schema: object) -> object:
    """The schema without its titles, which repeat the names."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value)
            for key, value in schema.items()
            if key != "title" or not isinstance(value, str)
        }
    return [_without_titles(each) for each in schema] if isinstance(schema, list) else schema
