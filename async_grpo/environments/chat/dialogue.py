"""What has been said to the model and by it, so that each prompt extends the turn before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from async_grpo.environments.chat.messages import Message, Renderer, Reply, ToolSpec, in_shape

if TYPE_CHECKING:
    from async_grpo.environments.base import Policy


@dataclass(frozen=True, slots=True, eq=False)
class _Said:
    """One turn of the model: the messages before it and its own, and the ids of both."""

    messages: tuple[str, ...]
    prompt_ids: Sequence[int]
    sampled_ids: Sequence[int]

    def is_before(self, messages: tuple[str, ...]) -> bool:
        """Whether they begin with all of these, and go on."""
        num_said = len(self.messages)
        return num_said < len(messages) and messages[:num_said] == self.messages


class Dialogue:
    """One conversation, or several that share beginnings, with one set of tools.

    Whoever speaks keeps the messages, and gives all of them each time. Messages that begin as a
    turn of the model ended extend that turn, id by id; any others are rendered anew, and begin
    another row where they do not happen to agree.
    """

    def __init__(self, renderer: Renderer, *, tools: Sequence[ToolSpec] = ()) -> None:
        self._renderer = renderer
        self._tools = tuple(tools)
        self._said: list[_Said] = []

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn of the model."""
        return self._renderer.stop_token_ids

    @property
    def is_plain(self) -> bool:
        """Whether `text` of some of a turn is how its content begins."""
        return self._renderer.is_plain and not self._tools

    def text(self, sampled_ids: Sequence[int]) -> str:
        """The content of a turn, or of as much of it as there is."""
        return self._renderer.parse(sampled_ids).content

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids that the model is asked to go on from; raises `MessagesError`."""
        keys = tuple(map(_key, messages))
        begun = [said for said in self._said if said.is_before(keys)]
        if begun:
            last = max(begun, key=lambda said: len(said.messages))
            extended = self._renderer.extend(
                last.prompt_ids,
                sampled_ids=last.sampled_ids,
                messages=messages[len(last.messages) :],
                tools=self._tools,
            )
            if extended is not None:
                return extended
        return self._renderer.render(messages, tools=self._tools)

    def heard(
        self,
        messages: Sequence[Message],
        *,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        shown: Callable[[str], str] = str,
    ) -> Reply:
        """What the model has answered to `prompt_ids`, which `prompt(messages)` gave.

        `shown`: what of its content whoever speaks is given, and will bring back.
        """
        reply = self._renderer.parse(sampled_ids, prompt_ids=prompt_ids, tools=self._tools)
        reply = replace(reply, content=shown(reply.content))
        keys = (*map(_key, messages), _key(reply.message()))
        self._said.append(_Said(keys, prompt_ids, [int(token) for token in sampled_ids]))
        return reply

    async def reply(
        self, policy: Policy, messages: Sequence[Message], *, max_tokens: int | None = None
    ) -> Reply:
        """One turn of the policy, read."""
        prompt_ids = self.prompt(messages)
        turn = await policy.sample(prompt_ids, max_tokens=max_tokens, stop=self.stop_token_ids)
        return self.heard(messages, prompt_ids=prompt_ids, sampled_ids=turn.token_ids.tolist())


def _key(message: Message) -> str:
    """What two copies of a message have in common, wherever one of them has been.

    Clients leave out thoughts, write JSON in their own way, and say None for an empty text.
    """
    shaped = in_shape(message)
    calls = [call["function"] for call in shaped.get("tool_calls", ())]
    called = [(function["name"], function["arguments"]) for function in calls]
    who = [shaped["role"], shaped.get("tool_call_id") or ""]
    return json.dumps([*who, shaped["content"], called], sort_keys=True)
