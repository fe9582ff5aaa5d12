"""What a tool is, and what may go wrong with a call.

A mistake of the model's is something that it reads; whatever else fails is an error of the episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from async_grpo.environments.base import ModelError
from async_grpo.environments.chat.messages import ToolSpec


class ToolMistake(ModelError, ValueError):
    """What the model wrote cannot be done; the message says why, in words for the model."""


class Tool(Protocol):
    """Something that a model may call, from many episodes at a time."""

    @property
    def spec(self) -> ToolSpec:
        """What the model is told of it."""

    async def call(self, arguments: Mapping[str, object]) -> str:
        """What the model reads.

        Raises `ToolMistake`, or any `ModelError`, for the model's own mistakes. A connection that
        fails is made again while its server is away; anything else fails the episode's group. A
        tool whose `is_idempotent` is true may be called twice for one call of the model's.
        """


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one call has given."""

    call_id: str
    name: str
    text: str
    is_mistake: bool = False  # of the model's

    def message(self) -> dict[str, object]:
        """The message that answers the call."""
        return {
            "role": "tool",
            "tool_call_id": self.call_id,
            "name": self.name,
            "content": self.text,
        }
