"""Countdown for `verifiers`, with a server of tools; it knows nothing of async-grpo."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

SUM = re.compile(r"\d{1,4}(?:[+-]\d{1,4})*")


def value(text: str) -> int:
    """The value of a sum of whole numbers; raises ValueError for other texts."""
    if not SUM.fullmatch(text):
        raise ValueError(f"no sum: {text[:40]}")
    return sum(map(int, re.findall(r"[+-]?\d+", text)))


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None  # the model knows it as `calculate`, not as `calculator_calculate`

    @vf.tool
    async def calculate(self, expression: str) -> str:
        """The value of an expression of whole numbers, + and -."""
        return str(value(expression))


class CountdownData(vf.TaskData):
    numbers: list[int]
    target: int


class CountdownTask(vf.Task[CountdownData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        said = (trace.nodes[-1].message.content or "").strip()
        left, _, claim = said.partition("=")
        try:
            is_right = value(left) == self.data.target and claim in ("", str(self.data.target))
        except ValueError:
            return 0.0
        used = sorted(map(int, re.findall(r"\d+", left)))
        return float(is_right and used == sorted(self.data.numbers))

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]


class Countdown(vf.Taskset[CountdownTask, vf.TasksetConfig]):
    def load(self) -> Iterator[CountdownTask]:
        rng = random.Random(0)
        for _ in range(1000):
            numbers = [rng.randint(1, 9) for _ in range(3)]
            target = numbers[0] + sum(rng.choice((-1, 1)) * number for number in numbers[1:])
            shown = " ".join(map(str, rng.sample(numbers, 3)))
            data = CountdownData(
                prompt=f"use {shown} to make {target}\n", numbers=numbers, target=target
            )
            yield CountdownTask(data, self.config.task)


__all__ = ["Countdown"]

if __name__ == "__main__":  # as verifiers starts the server of the tools
    Calculator.run()
