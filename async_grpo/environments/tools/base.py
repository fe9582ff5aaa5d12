"""Defines tools and the results of their calls.

The model reads what is wrong with its calls; any other failure is an error of the episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from async_grpo.environments.base import ModelError
from async_grpo.environments.chat.messages import ToolSpec


class ToolMistake(ModelError, ValueError):
    """A call that the model wrote cannot be carried out; the message tells the model why."""


class Tool(Protocol):
    """A function that a model may call, from many episodes at a time."""

    @property
    def spec(self) -> ToolSpec:
        """Its description, which the model reads."""

    async def call(self, arguments: Mapping[str, object]) -> str:
        """The result, which the model reads.

        Raises `ToolMistake`, or any `ModelError`, for the model's own mistakes. A connection that
        fails is made again while its server is away; any other error fails the episode's group. A
        tool whose `is_idempotent` is true may be called twice for one call that the model wrote.
        """


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one call."""

    call_id: str
    name: str
    text: str
    is_mistake: bool = False  # the model's

    def message(self) -> dict[str, object]:
        """The message that answers the call."""
        return {
            "role": "tool",
            "tool_call_id": self.call_id,
            "name": self.name,
            "content": self.text,
        }
