"""An agent by openai-agents, as its users write one: python openai_sdk.py API [stream]."""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from pydantic import BaseModel


class Sum(BaseModel):
    total: int


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def main(api, *flags):
    set_tracing_disabled(True)
    set_default_openai_api(api)
    agent = Agent(
        name="adder",
        instructions="Add with the tool.",
        tools=[add],
        model_settings=ModelSettings(tool_choice="required"),
        output_type=Sum,
    )
    if "stream" in flags:
        result = Runner.run_streamed(agent, sys.stdin.read())
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, sys.stdin.read())
    assert result.final_output.total == 5


asyncio.run(main(*sys.argv[1:]))
