"""Measure chat models on held-out countdown puzzles, with the calculator of the example.

    python sample-data/measure_countdown_chat.py sample-data/tiny-chat

Samples with transformers at temperature 1, all episodes side by side, in the example's environment.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from countdown_demonstrations import compact_prompt, split_tasks
from create_count_down import CountDownTask
from measure_countdown import mean, reward

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

NUM_SAMPLES = 8
MAX_NEW_TOKENS = 64
MAX_ROW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Measurement:
    """Episodes of puzzles."""

    accuracy: float  # share of episodes that solve their puzzle
    calls: float  # mean over episodes
    output_tokens: float  # sampled, mean over episodes

    def __str__(self) -> str:
        return (
            f"accuracy {self.accuracy:.3g}, calls {self.calls:.3g}, "
            f"output_tokens {self.output_tokens:.3g}"
        )


class Engine:
    """Answers all players at once, when each of them has asked or left."""

    def __init__(self, model: Any, tokenizer: Any, *, num_players: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._num_players = num_players
        self._asked: list[tuple[list[int], asyncio.Future[list[int]]]] = []

    async def generate(self, history: Any, sampling: Any, prefer: str) -> Any:
        """A turn, as `EpisodePolicy` asks for it."""
        from async_grpo.types import Turn

        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._asked.append((history.tolist(), answer))
        self._answer_if_all_asked()
        ids = await answer
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        none = np.zeros(len(ids), np.float32)
        return Turn(np.array(ids, np.int32), none, (), "stop", text)

    def leave(self) -> None:
        """A player has ended its episode."""
        self._num_players -= 1
        self._answer_if_all_asked()

    def _answer_if_all_asked(self) -> None:
        if not self._asked or len(self._asked) < self._num_players:
            return
        asked, self._asked = self._asked, []
        end = self._tokenizer.eos_token_id
        inputs = self._tokenizer.pad(
            {"input_ids": [ids for ids, _ in asked]}, padding_side="left", return_tensors="pt"
        )
        output = self._model.generate(
            **inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=True, top_k=0
        )
        for (_, answer), row in zip(asked, output.tolist(), strict=True):
            ids = row[inputs["input_ids"].shape[1] :]
            answer.set_result(ids[: ids.index(end) + 1] if end in ids else ids)


@dataclass(frozen=True, slots=True)
class Talk:
    """The services of an episode: nothing but its renderer."""

    renderer: Any

    async def dialogue(self, *, tools: Sequence[Any] = ()) -> Any:
        from async_grpo.environments.chat.messages import Dialogue

        return Dialogue(self.renderer, tools=tools)


def measure(folder: Path, *, tasks: Sequence[CountDownTask], seed: int = 0) -> Measurement:
    """Load the model of `folder` and let it play `tasks`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from async_grpo.environments.chat.find import find_renderer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    many = [task for task in tasks for _ in range(NUM_SAMPLES)]
    engine = Engine(model, tokenizer, num_players=len(many))
    torch.manual_seed(seed)
    talk = Talk(find_renderer(str(folder)))
    episodes = asyncio.run(play_all(engine, talk, many))
    return Measurement(
        accuracy=mean([reward(e.text, t) == 1.0 for e, t in zip(episodes, many, strict=True)]),
        calls=mean([len(episode.turns) - 1 for episode in episodes]),
        output_tokens=mean([sum(len(t.token_ids) for t in e.turns) for e in episodes]),
    )


async def play_all(engine: Engine, talk: Talk, tasks: Sequence[CountDownTask]) -> list[Any]:
    """An episode of each."""
    from countdown_calculator import CountdownCalculator

    from async_grpo.environments.episode import EpisodePolicy, NoRoom
    from async_grpo.types import Question, SamplingContract

    environment = CountdownCalculator()

    async def play(task: CountDownTask) -> Any:
        question = Question(np.zeros(1, np.int32), compact_prompt(task), str(task.target), {})
        sampling = SamplingContract(1.0, (), MAX_NEW_TOKENS)
        policy = EpisodePolicy(engine.generate, sampling=sampling, max_row_tokens=MAX_ROW_TOKENS)
        try:
            return await environment.play(question, policy, talk)
        except NoRoom:
            return policy.episode(is_cut=True)
        finally:
            engine.leave()

    return await asyncio.gather(*(play(task) for task in tasks))


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(model: Path) -> None:
    _, held_out = split_tasks()
    click.echo(f"{measure(model, tasks=held_out)}")


if __name__ == "__main__":
    main()
