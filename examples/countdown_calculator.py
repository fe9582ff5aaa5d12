"""Countdown with a calculator: the model may try expressions before it answers.

async-grpo-worker --mode environment
async-grpo train --environment examples/countdown_calculator.py:CountdownCalculator ...
"""

from async_grpo.environments.tools.base import ToolMistake
from async_grpo.environments.tools.environment import ToolEnvironment
from async_grpo.environments.tools.function import tool
from async_grpo.verification.graders.countdown import MalformedError, parse_equation


@tool
def calculate(expression: str) -> str:
    """The value of an expression of whole numbers, + - * / and parentheses."""
    try:
        value = parse_equation(expression).value
    except MalformedError as error:
        raise ToolMistake(f"no expression: {error}") from error
    if value is None:
        raise ToolMistake("it divides by zero")
    return str(value)


class CountdownCalculator(ToolEnvironment):
    """Grade it with `--reward-fns countdown`."""

    tools = (calculate,)
    max_turns = 4
