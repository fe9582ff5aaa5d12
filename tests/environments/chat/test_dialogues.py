"""Random dialogues: what is trained is what the engine sampled, and forks are where they must be.

The engine samples any ids, also such as no text is tokenised to.
"""

import asyncio
import functools
import itertools

import numpy as np
import pytest
from effort import histories
from families import LIBRARY, tokenizer_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from players import make_turn

from async_grpo.environments.chat.find import library_renderer
from async_grpo.environments.chat.messages import Dialogue
from async_grpo.environments.chat.template import TemplateRenderer
from async_grpo.environments.episode import EpisodePolicy
from async_grpo.types import SamplingContract

BY_TEMPLATE = ["smollm2", "qwen2_5", "phi3", "llama3"]
EACH = settings(
    max_examples=histories(240) // len([*BY_TEMPLATE, *LIBRARY]),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TEXTS = st.text(max_size=8) | st.sampled_from(["the thin hat", "<|im_end|>", "<think>", "\n\n"])
SAID = st.sampled_from(
    [
        "the thing",
        "<think>\nhm, then\n</think>\n\nthat",
        "<think>never",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "<tool_call>{",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ]
)
PIECES = st.lists(SAID | st.lists(st.integers(0, 10_000), max_size=5), max_size=3)
KINDS = st.sampled_from(["user", "user", "results", "results", "edit", "go back", "forget"])
STEPS = st.lists(st.tuples(PIECES, st.booleans(), KINDS, TEXTS), min_size=1, max_size=6)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@functools.cache
def renderer_of(family):
    if family in LIBRARY:
        pytest.importorskip("renderers")
        return library_renderer(tokenizer_of(family), name=LIBRARY[family])
    return TemplateRenderer(tokenizer_of(family))


def ids_of(family, pieces, *, is_cut):
    """Ids of one turn: texts in tokens of their own, and any ids at all but those that end it."""
    tokenizer, ends = tokenizer_of(family), renderer_of(family).stop_token_ids
    ids = []
    for piece in pieces:
        is_text = isinstance(piece, str)
        ids += tokenizer(piece)["input_ids"] if is_text else [i % len(tokenizer) for i in piece]
    ids = [token for token in ids if token not in ends] or [0]
    return ids if is_cut else [*ids, ends[0]]


def follow(messages, reply, kind, text):
    """The messages before the next turn."""
    said = [*messages, reply.message()]
    if kind == "results":
        calls = reply.tool_calls or ({"id": "none"},)
        ids = [call.id if hasattr(call, "id") else "none" for call in calls]
        return [*said, *({"role": "tool", "tool_call_id": i, "content": text} for i in ids)]
    if kind == "edit":
        said[0] = {"role": "user", "content": f"else {text}"}
    if kind == "go back":
        said = messages[:1]
    if kind == "forget":
        said = said[-1:]
        said.insert(0, {"role": "user", "content": "before"})
    return [*said, {"role": "user", "content": text}]


def played(family, steps, tools):
    """(episode, [(asked ids, sampled ids, how the next messages were made)])."""
    record = []
    rest = iter([ids_of(family, pieces, is_cut=is_cut) for pieces, is_cut, *_ in steps])

    async def generate(history, sampling, prefer):
        record.append((history.tolist(), next(rest)))
        return make_turn(record[-1][1])

    async def scenario():
        sampling = SamplingContract(1.0, (), 10_000)
        policy = EpisodePolicy(generate, sampling=sampling, max_row_tokens=10**7)
        dialogue = Dialogue(renderer_of(family), tools=tools)
        messages = [{"role": "user", "content": "begin"}]
        for _, _, kind, text in steps:
            reply = await dialogue.reply(policy, messages)
            messages = follow(messages, reply, kind, text)
        return policy.episode()

    return asyncio.run(scenario()), record


@pytest.mark.parametrize("family", [*BY_TEMPLATE, *LIBRARY])
@EACH
@given(steps=STEPS, has_tools=st.booleans())
def test_rows_hold_exactly_what_the_engine_read_and_sampled(family, steps, has_tools):
    tools = [ADD] if has_tools else []
    episode, record = played(family, steps, tools)

    trained = []
    for row in episode.rows:
        whole, start = (
            [*row.prompt_token_ids.tolist(), *row.token_ids.tolist()],
            len(row.prompt_token_ids),
        )
        trained += [tuple(whole[: start + t + 1]) for t in np.flatnonzero(row.loss_mask)]
    sampled = [(*asked, *ids[: t + 1]) for asked, ids in record for t in range(len(ids))]
    assert sorted(trained) == sorted(sampled)

    ends, num_forks = [], 0  # of rows, as somebody sees them who knows asked and sampled ids alone
    for asked, ids in record:
        extended = [end for end in ends if asked[: len(end)] == end]
        num_forks += not extended
        if extended:
            ends.remove(max(extended, key=len))
        ends.append(asked + ids)
    assert len(episode.rows) == num_forks


@pytest.mark.parametrize("family", BY_TEMPLATE)
@EACH
@given(steps=STEPS)
def test_whoever_only_goes_on_stays_in_one_row(family, steps):
    onward = [(pieces, is_cut, "user", text) for pieces, is_cut, _, text in steps]
    episode, record = played(family, onward, [ADD])
    assert len(episode.rows) == 1
    for (asked, ids), (then, _) in itertools.pairwise(record):
        assert then[: len(asked) + len(ids)] == asked + ids
