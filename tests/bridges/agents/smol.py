"""An agent by smolagents, as its users write one: python smol.py [stream]."""

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """The sum of two numbers.

    Args:
        a: one
        b: another
    """
    return a + b


model = OpenAIModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[add], model=model, stream_outputs="stream" in sys.argv, max_steps=4)
assert agent.run(sys.stdin.read()) == 5
