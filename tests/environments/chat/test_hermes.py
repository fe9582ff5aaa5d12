"""What a model writes as calls, right and wrong."""

import pytest

from async_grpo.environments.chat.template import read_reply

GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def test_calls_and_words_are_told_apart():
    reply = read_reply(f"First:\n{GOOD}\nthen\n{GOOD}")
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("f", {"x": 1})] * 2
    assert "First:" in reply.content and "tool_call" not in reply.content


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{</tool_call>", "no JSON"),
        ('<tool_call>{"name": "f", "arguments": {}}', "does not end"),
        ("<tool_call>[]</tool_call>", "object with a name"),
        ('<tool_call>{"arguments": {}}</tool_call>', "object with a name"),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "must be a JSON object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON"),
        ("<tool_call>" + "9" * 10_000 + "</tool_call>", "no JSON"),
        ("<tool_call>", "no JSON"),
    ],
)
def test_a_broken_call_says_why_and_stays_as_written(text, problem):
    (call,) = read_reply(text).tool_calls
    assert problem in call.problem
    assert call.text == text
    message = read_reply(text).message()
    assert message["content"] == text and "tool_calls" not in message


def test_one_broken_call_leaves_the_others():
    reply = read_reply(f"{GOOD}<tool_call>{{</tool_call>{GOOD}")
    assert [bool(call.problem) for call in reply.tool_calls] == [False, True, False]
    assert len(reply.message()["tool_calls"]) == 2
