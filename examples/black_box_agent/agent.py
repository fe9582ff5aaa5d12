"""An agent that knows `openai` only: countdown with a calculator, on any server of its protocol.

async-grpo train --environment "agent:python examples/black_box_agent/agent.py" ...
"""

import json
import re
import sys

from openai import OpenAI

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an expression of whole numbers, + - * / and parentheses.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def calculate(expression=""):
    if not re.fullmatch(r"[-+*/() 0-9]{1,40}", expression) or "**" in expression:
        return "no expression"
    try:
        return str(eval(expression))
    except (ArithmeticError, SyntaxError, TypeError):
        return "it has no value"


client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY say where, and as whom
messages = [{"role": "user", "content": sys.stdin.read()}]
for _ in range(4):
    answer = client.chat.completions.create(model="any", messages=messages, tools=[CALCULATE])
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        result = calculate(json.loads(call.function.arguments).get("expression"))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not message.tool_calls:
        break
print(messages[-1].content)
