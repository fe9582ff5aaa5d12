"""A question, one answer, its verdict: the environment that needs no worker of its own."""

from __future__ import annotations

from collections.abc import Sequence

from async_grpo.environments.base import Environment, Policy, Services
from async_grpo.types import Episode, Question, Turn


class SingleTurn(Environment):
    """The controller plays it itself: all members of a group are one request to one engine."""

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """The question, answered once."""
        await policy.sample(question.input_token_ids)
        return policy.episode()


def episodes_of(question: Question, turns: Sequence[Turn]) -> tuple[Episode, ...]:
    """What `SingleTurn` makes of the answers to one request."""
    return tuple(Episode.of_turn(question.input_token_ids, turn) for turn in turns)
