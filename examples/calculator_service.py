"""A calculator that is a service of its own, and an environment of two turns that asks it.

async-grpo worker --mode examples/calculator_service.py:Calculator
async-grpo worker --mode environment
async-grpo train --environment examples/calculator_service.py:SecondTry ...
"""

import asyncio

import numpy as np

from async_grpo.environments.base import Environment, Policy, Services
from async_grpo.environments.chat.find import find_tokenizer
from async_grpo.environments.service import Service
from async_grpo.types import Episode, Question
from async_grpo.verification.graders.countdown import MalformedError, parse_equation


class Calculator(Service):
    """Asked as `services["calculator"]`: the value of an expression, or what is wrong with it."""

    capacity = 64  # requests that a worker answers at a time

    async def answer(self, request: str) -> str:
        try:
            value = parse_equation(request.strip()).value
        except MalformedError as error:
            return f"no number: {error}"
        return "a division by zero" if value is None else str(value)


class SecondTry(Environment):
    """Who does not hit the target hears what the answer makes, and may answer once more."""

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        first = await policy.sample(question.input_token_ids)
        value = await services["calculator"](first.text)
        if value != question.answer:
            tokenizer = await asyncio.to_thread(find_tokenizer, services.model)
            heard = tokenizer(f"that is {value}\n{question.input}", add_special_tokens=False)
            await policy.sample(
                np.concatenate([question.input_token_ids, first.token_ids, heard["input_ids"]])
            )
        return policy.episode()
