"""Guess a token, hear whether it was too low, guess again: an environment in one file.

Everything is tokens: token n stands for the number n, two of them for what the player hears.
"""

import numpy as np

from async_grpo.environments.base import Environment
from async_grpo.types import Verdict

HIGHER, LOWER = 60, 61


class TwoTurns(Environment):
    """`answer` is the number that was thought of; the reward is how near the last guess came."""

    async def play(self, question, policy, services):
        history = question.input_token_ids
        first = await policy.sample(history, max_tokens=4)
        if first.token_ids[-1] == int(question.answer):
            return policy.episode()
        heard = HIGHER if first.token_ids[-1] < int(question.answer) else LOWER
        history = np.concatenate([history, first.token_ids, [heard]])
        await policy.sample(history, max_tokens=4)
        return policy.episode()

    async def grade(self, question, episodes, services):
        guesses = [int(episode.turns[-1].token_ids[-1]) for episode in episodes]
        errors = [abs(guess - int(question.answer)) for guess in guesses]
        return [Verdict.scored(1 - error / 64, adapter="distance") for error in errors]


class Structured(TwoTurns):
    """Its first guess has to fit a grammar."""

    async def play(self, question, policy, services):
        history = question.input_token_ids
        first = await policy.sample(history, max_tokens=4, grammar="{}")
        history = np.concatenate([history, first.token_ids, [HIGHER]])
        await policy.sample(history, max_tokens=4)
        return policy.episode()


class Forgetful(TwoTurns):
    """Reads only what it has heard before its second guess: the history is rewritten."""

    async def play(self, question, policy, services):
        await policy.sample(question.input_token_ids, max_tokens=4)
        await policy.sample([HIGHER, *question.input_token_ids], max_tokens=4)
        return policy.episode()
