"""/v1/responses by the stock `openai` client, whole and as a stream."""

import openai
import pytest
from gateways import Scripted, client_of, listening, said
from openai.types.responses import Response, ResponseStreamEvent
from players import make_turn
from pydantic import TypeAdapter

from async_grpo.environments.chat.messages import Reply
from async_grpo.gateway.answers import AnsweredChoice
from async_grpo.gateway.responses import ResponseForm, ResponsesRequest, messages_of
from async_grpo.util.errors import WorkerError

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
EVENTS = TypeAdapter(ResponseStreamEvent)


def ask(client, asked="What is 2+3?", **options):
    return client.responses.create(model="policy", input=asked, **options)


def streamed(url, **options):
    """The events of a stream, each as OpenAI's model of it has it, and the response at its end."""
    events = list(ask(client_of(url), stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event.to_dict())
    return [event.type for event in events], events, events[-1].response


def test_a_response_is_answered_as_openai_s_model_has_it():
    sampler = Scripted(said("It is 5."))
    with listening(sampler) as url:
        response = ask(
            client_of(url), instructions="Be kind.", max_output_tokens=20, temperature=0.5
        )
    Response.model_validate(response.to_dict())
    assert (response.output_text, response.status) == ("It is 5.", "completed")
    (turn,) = sampler.asked
    assert (turn.max_tokens, turn.temperature) == (20, 0.5)
    used = response.usage
    assert (used.input_tokens, used.output_tokens) == (len(turn.prompt_ids), len(said("It is 5.")))


def test_a_stream_says_the_same_as_it_comes():
    with listening(Scripted(said("It is 5, häh?"), piece=2)) as url:
        types, events, response = streamed(url)
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert types == [
        *(f"response.{name}" for name in begin),
        *["response.output_text.delta"] * len(deltas),
        *(f"response.{name}" for name in end),
    ]
    assert len(deltas) > 3
    assert "".join(deltas) == response.output_text == "It is 5, häh?"
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {
        response.output[0].id
    }


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_is_cut_is_incomplete(stream):
    with listening(Scripted(said("one two", ends=False))) as url:
        response = streamed(url)[2] if stream else ask(client_of(url))
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_items_and_their_outputs_extend_what_was_sampled(stream):
    sampler = Scripted(said("Let me see." + CALL + CALL), said("5"))
    with listening(sampler) as url:
        client = client_of(url, session="one")
        options = {"tools": [ADD], "tool_choice": "required"}
        if stream:
            *_, last = ask(client, stream=True, **options)
            response = last.response
        else:
            response = ask(client, **options)
        message, *calls = response.output
        assert message.content[0].text == "Let me see."
        assert [(call.name, call.arguments) for call in calls] == [("add", '{"a": 2}')] * 2
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
            for call in calls
        ]
        said_before = [item.to_dict() for item in response.output]
        question = {"role": "user", "content": [{"type": "input_text", "text": "What is 2+3?"}]}
        assert ask(client, [question, *said_before, *results], tools=[ADD]).output_text == "5"
    first, second = sampler.asked
    assert first.grammar and not second.grammar
    history = [*first.prompt_ids, *said("Let me see." + CALL + CALL)]
    assert list(second.prompt_ids[: len(history)]) == history


def test_a_stream_of_a_call_has_its_arguments():
    with listening(Scripted(said(CALL))) as url:
        types, events, response = streamed(url, tools=[ADD])
    assert types == [
        f"response.{name}"
        for name in (
            "created",
            "in_progress",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        )
    ]
    assert events[2].item.arguments == ""
    assert events[4].arguments == response.output[0].arguments == '{"a": 2}'


def test_json_is_sampled_under_its_grammar():
    sampler = Scripted(said('{"x": 1}'))
    form = {"type": "json_schema", "name": "point", "schema": POINT, "strict": True}
    with listening(sampler) as url:
        ask(client_of(url), text={"format": form})
    assert '\\"x\\"' in sampler.asked[0].grammar


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"background": True}, "background must be False here, got True"),
        ({"conversation": "c"}, "conversation must be left out here"),
        ({"previous_response_id": "r"}, "previous_response_id must be left out here, got 'r'"),
        ({"include": ["message.output_text.logprobs"]}, "include must be"),
        ({"truncation": "auto"}, "truncation must be 'disabled' here"),
        ({"top_p": 0.5}, "top_p must be 1 here, got 0.5"),
        ({"tools": [{"type": "web_search"}]}, "functions here, got one of type 'web_search'"),
        ({"tool_choice": "required"}, "tool_choice must be left out unless tools"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice."),
        ({"text": {"format": {"type": "xml"}}}, "text.format."),
        ({"text": {"format": "json"}}, "text.format."),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "of type 'item_reference'"),
        ({"input": [{"role": "king", "content": "x"}]}, "a role of system"),
        ({"input": []}, "at least one message"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(options, sentence):
    with listening(Scripted()) as url, pytest.raises(openai.BadRequestError) as caught:
        client_of(url).responses.create(**{"model": "policy", "input": "x"} | options)
    assert sentence in caught.value.body["message"]


def test_a_model_that_fails_in_a_stream_is_an_error_of_the_client_s():
    with listening(Scripted(WorkerError("the engine died"))) as url:
        stream = ask(client_of(url), stream=True)
        with pytest.raises(openai.APIError, match="the engine died"):
            list(stream)


def test_thoughts_are_an_item_of_their_own_before_the_message():
    form = ResponseForm("policy", asked=ResponsesRequest(input="x", tools=[ADD]))
    turn = make_turn([5, 6])
    choice = AnsweredChoice(0, turn, Reply("5", reasoning="2 and 3"))
    response = form.whole([choice], 7)
    Response.model_validate(response.to_dict())
    thoughts, message = response.output
    assert (thoughts.content[0].text, message.content[0].text) == ("2 and 3", "5")
    events = list(form.end([choice], 7, num_sent=0))
    for event in events:
        EVENTS.validate_python(event.to_dict())
    assert [event.output_index for event in events[:-1]] == [0, 0, 1, 1, 1, 1, 1, 1]


def test_calls_stand_with_the_message_before_them_and_not_with_an_older_one():
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    user = {"role": "user", "content": "x"}
    assert [m["role"] for m in messages_of([user, call, call])] == ["user", "assistant"]
    reply = {"role": "assistant", "content": "y"}
    (_, message) = messages_of([user, reply, {"type": "reasoning"}, call])
    assert (message["content"], len(message["tool_calls"])) == ("y", 1)
