"""The package `renderers` behind our protocol."""

import pytest
from families import LIBRARY, tokenizer_of

from async_grpo.environments.chat.find import find_renderer, known_family, library_renderer
from async_grpo.util.errors import ConfigError, UnfitModel

pytest.importorskip("renderers")

ASKED = [{"role": "user", "content": "What is 2+3?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
USED = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def qwen3():
    return library_renderer(tokenizer_of("qwen3"), name="qwen3")


def said(text):
    return tokenizer_of("qwen3")(f"{text}<|im_end|>")["input_ids"]


@pytest.mark.parametrize("family", LIBRARY)
def test_a_prompt_is_what_the_models_own_template_makes(family):
    tokenizer = tokenizer_of(family)
    expected = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    assert library_renderer(tokenizer, name=LIBRARY[family]).render(ASKED) == list(expected)


def test_thoughts_calls_and_results_stay_in_one_row():
    renderer = qwen3()
    prompt = renderer.render(ASKED, tools=[ADD])
    sampled = said(f"<think>\nadd\n</think>\n\n{CALL}")
    reply = renderer.parse(sampled, prompt_ids=prompt, tools=[ADD])
    assert reply.reasoning.strip() == "add"
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("add", {"a": 2})]
    result = [{"role": "tool", "content": "5"}]
    extended = renderer.extend(prompt, sampled_ids=sampled, messages=result, tools=[ADD])
    assert extended[: len(prompt) + len(sampled)] == [*prompt, *sampled]


@pytest.mark.parametrize("family", LIBRARY)
def test_what_a_tool_says_becomes_no_mark_of_the_family(family):
    tokenizer = tokenizer_of(family)
    marks = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    marks = [mark for mark in marks if mark in tokenizer.chat_template]
    renderer = library_renderer(tokenizer, name=LIBRARY[family])

    def count(said):
        messages = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [USED]},
                    {"role": "tool", "content": said, "tool_call_id": "1"}]  # fmt: skip
        return sum(index in tokenizer.added_tokens_decoder for index in renderer.render(messages))

    assert marks and count("5".join(marks)) == count("5")


def test_a_new_question_forks_where_the_family_drops_its_thoughts():
    renderer = qwen3()
    prompt, sampled = renderer.render(ASKED), said("<think>\nadd\n</think>\n\n5")
    assert renderer.extend(prompt, sampled_ids=sampled, messages=ASKED) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [("<tool_call>\n{</tool_call>", "no JSON"), (CALL[:-13], "does not end")],
)
def test_broken_calls_say_why(text, problem):
    (call,) = qwen3().parse(said(text), tools=[ADD]).tool_calls
    assert problem in call.problem and call.text


def test_another_familys_renderer_is_refused():
    with pytest.raises(UnfitModel, match="does not fit the tokenizer"):
        library_renderer(tokenizer_of("llama3"), name="qwen3")


@pytest.mark.parametrize("name", ["nobody", "default"])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ConfigError, match=r"--renderer must be one of auto, template, .*qwen3"):
        library_renderer(tokenizer_of("qwen3"), name=name)


def test_a_model_of_the_hub_is_known_by_its_name():
    assert known_family("/x/hub/models--Qwen--Qwen3-8B/snapshots/abc") == "qwen3"
    assert known_family("/x/models/Qwen3-8B") == ""


def test_a_folder_is_served_by_the_renderer_that_is_named(tmp_path):
    tokenizer_of("qwen3").save_pretrained(tmp_path)
    assert find_renderer(str(tmp_path), "qwen3").render(ASKED) == qwen3().render(ASKED)
    with pytest.raises(UnfitModel, match="--renderer"):
        find_renderer(str(tmp_path))
