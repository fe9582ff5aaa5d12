"""What a tool is, and what may go wrong with a call.

A mistake of the model's is something that it reads; whatever else fails is an error of the episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from async_grpo.chat.base import ToolSpec


class ToolMistake(ValueError):
    """What the model wrote cannot be done; the message says why, in words for the model."""


class Tool(Protocol):
    """Something that a model may call, from many episodes at a time."""

    @property
    def spec(self) -> ToolSpec:
        """What the model is told of it."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What the model reads.

        Raises `ToolMistake` for the model's own mistakes; anything else fails the episode.
        """


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one call has given."""

    call_id: str
    name: str
    text: str
    is_mistake: bool = False  # of the model's

    def message(self) -> dict[str, Any]:
        """The message that answers the call."""
        return {
            "role": "tool",
            "tool_call_id": self.call_id,
            "name": self.name,
            "content": self.text,
        }
