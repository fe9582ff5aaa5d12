"""A question, one answer, its verdict: the environment that needs no worker of its own."""

from __future__ import annotations

from async_grpo.environments.base import Environment, Policy, Services
from async_grpo.types import Episode, Question


class SingleTurn(Environment):
    """The controller plays it itself: all members of a group are one request to one engine."""

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """The question, answered once."""
        await policy.sample(question.input_token_ids)
        return policy.episode()
