"""Make a tiny Qwen3 that chats in ChatML, and rarely tries its sums with a calculator.

    OMP_NUM_THREADS=1 python sample-data/create_tiny_chat_model.py

Its tokens are characters, and the words of its chat format. It begins as `tiny-countdown`, and the
project's own trainer shows it dialogues: in some, somebody calls `calculate`
(examples/countdown_calculator.py) until a sum hits; in the others, somebody answers the puzzle at
once, and wrongly. A first stage teaches both, a short second one the habit of answering at once. So
there is a better way of playing to be found, and sums to be learned.
Data and weights depend on `--seed` alone, up to rounding.
"""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from atomic_files import draft_beside, replace_folder, write_jsonl
from countdown_demonstrations import NUM_HELD_OUT, attempt, compact_prompt, split_tasks
from create_count_down import CountDownTask
from create_tiny_model import (
    CHARACTERS,
    SPECIAL_TOKENS,
    Kind,
    Stage,
    make_model,
    scaled,
    train,
    write_rounded,
)
from measure_countdown_chat import NUM_SAMPLES, measure

HERE = Path(__file__).resolve().parent
STUDENT = HERE / "tiny-countdown"
sys.path.append(str(HERE.parent / "examples"))

CONTROL_TOKENS = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
WORDS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "system", "user",
    "assistant", "tools:", '{"name": "', "calculate", '", "arguments": {"expression": "', '"}}',
)  # fmt: skip
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\ntools:' }}
{%- for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
KIND = Kind(
    "tiny-chat",
    "add",
    (
        Stage("dialogues", 530, 64, learning_rate=2e-3, share_right=0.5),
        Stage("habit", 30, 64, learning_rate=3e-4, share_right=0.5),
    ),
    dtype="bfloat16",
)
SHARE_CALLING = {"dialogues": 0.8, "habit": 0.25}  # of a stage's dialogues
SHARE_LUCKY = 0.12  # of sums that are answered at once
MAX_CALLS = 3  # the environment's last turn is for the answer


@functools.cache
def make_tokenizer() -> Any:
    """One token a character, or one of `WORDS`; decoding gives the text back exactly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, unknown, _, end = CONTROL_TOKENS
    vocabulary = {token: index for index, token in enumerate((*CONTROL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    tokenizer.add_tokens(list(WORDS))
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def dialogue(task: CountDownTask, *, stage: Stage, rng: random.Random) -> list[str]:
    """What the model says, turn by turn: sums that it tries, and the equation that it answers."""
    if rng.random() >= SHARE_CALLING[stage.name]:
        return [attempt(task, is_right=rng.random() < SHARE_LUCKY, rng=rng)]
    right = attempt(task, is_right=True, rng=rng)
    tried: list[str] = []
    while len(tried) < MAX_CALLS:
        if rng.random() < stage.share_right:
            return [*tried, right.partition("=")[0], right]
        tried.append(attempt(task, is_right=False, rng=rng).partition("=")[0])
    return [*tried, right]


def pairs(tasks: Sequence[CountDownTask], *, stage: Stage, seed: int) -> Iterator[dict[str, Any]]:
    """The ends of a stage's dialogues in token ids, each after all that came before it.

    An end is the first right sum and whatever follows; calls with a wrong sum are only read. What
    the tool says of the right one is learned too: that is doing sums.
    """
    from async_grpo.environments.chat.template import TemplateRenderer

    rng, renderer = random.Random(f"{seed} {stage.name}"), TemplateRenderer(make_tokenizer())
    for _ in range(stage.num_steps * stage.batch_size):
        task = rng.choice(tasks)
        said = dialogue(task, stage=stage, rng=rng)
        *before, (prompt, completion) = turns(task, said, renderer=renderer)
        if before and said[-2] == said[-1].partition("=")[0]:
            first, _ = before[-1]
            prompt, completion = first, [*prompt[len(first) :], *completion]
        yield {"input_token_ids": prompt, "completion_token_ids": completion}


def turns(
    task: CountDownTask, said: Sequence[str], *, renderer: Any
) -> Iterator[tuple[list[int], list[int]]]:
    """Ids of each turn and of what it answers, as the environment would show it."""
    from countdown_calculator import calculate

    tokenizer, tools = make_tokenizer(), [calculate.spec]
    prompt = renderer.render([{"role": "user", "content": compact_prompt(task)}], tools=tools)
    for number, expression in enumerate(said, 1):
        is_call = number < len(said)
        call = (
            f'<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}'
        )
        text = f"{call}\n</tool_call>" if is_call else expression
        completion = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        yield prompt, completion
        if is_call:
            result = asyncio.run(calculate.call({"expression": expression}))
            read = [{"role": "tool", "content": result}]
            prompt = renderer.extend(prompt, sampled_ids=completion, messages=read, tools=tools)


def write_first(folder: Path, *, seed: int) -> None:
    """The model before its dialogues: `tiny-countdown`, but for tokens that it does not know."""
    from safetensors.torch import load_file

    tokenizer, model = make_tokenizer(), make_model(KIND, seed=seed)
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    name, weights = "model.embed_tokens.weight", load_file(STUDENT / "model.safetensors")
    new, old = model.get_input_embeddings().weight.detach().clone(), weights[name]
    new[tokenizer.eos_token_id] = old[SPECIAL_TOKENS.index("<eos>")]
    first, known = len(CONTROL_TOKENS), old[len(SPECIAL_TOKENS) :][: len(CHARACTERS)]
    new[first : first + len(CHARACTERS)] = known
    model.load_state_dict({**weights, name: new}, strict=False)  # the head is the embedding
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_start(folder: Path, *, kind: Kind, tasks: Sequence[CountDownTask], seed: int) -> Path:
    """Make the model and train it in stages, all in `folder`."""
    model = folder / "first"
    write_first(model, seed=seed)
    for stage in kind.stages:
        click.echo(f"stage {stage.name}: {stage.num_steps} steps of {stage.batch_size} turns")
        data = folder / f"{stage.name}.jsonl"
        write_jsonl(data, rows=pairs(tasks, stage=stage, seed=seed))
        model = train(model, stage=stage, data=data, num_processes=1, seed=seed)
    return model


@click.command(help=__doc__)
@click.option("--seed", default=0, show_default=True, help="Of weights, data and their order.")
@click.option(
    "--output",
    default=HERE / KIND.folder,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the model; replaced.",
)
@click.option(
    "--scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Factor on the steps: 0.01 for a quick look.",
)
def main(seed: int, output: Path, scale: float) -> None:
    tasks, held_out = split_tasks()
    with tempfile.TemporaryDirectory(prefix="tiny-model-") as folder, draft_beside(output) as draft:
        made = scaled(KIND, scale=scale)
        trained = warm_start(Path(folder), kind=made, tasks=tasks, seed=seed)
        write_rounded(trained, draft, dtype=KIND.dtype)
        figures = measure(draft, tasks=held_out)
        (draft / "README.md").write_text(
            "# A tiny model that chats, and rarely uses its calculator\n\n"
            "A Qwen3 with characters as tokens, made by\n"
            f"`python sample-data/create_tiny_chat_model.py --seed {seed} --scale {scale:g}`.\n"
            f"On {NUM_HELD_OUT} held-out puzzles, {NUM_SAMPLES} episodes each at temperature 1 in\n"
            f"`examples/countdown_calculator.py`: {figures}.\n"
        )
        replace_folder(output, draft=draft)
    click.echo(f"wrote {output}: {figures}")


if __name__ == "__main__":
    main()
