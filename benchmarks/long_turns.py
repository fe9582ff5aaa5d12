"""An environment whose episodes tell how long each of their turns took beyond the engine."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from async_grpo.environments.base import Environment, Policy, Services
from async_grpo.types import Episode, Question, Verdict


class LongTurns(Environment):
    """`columns` say how many turns, and the file that gets a line an episode."""

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """The engine writes into each turn's text how many seconds it took."""
        history, turns = question.input_token_ids, []
        for number in range(question.columns["num_turns"]):
            asked_s = time.monotonic()
            turn = await policy.sample(history)
            waited_s = time.monotonic() - asked_s - float(turn.text)
            turns.append((asked_s, 1e3 * waited_s))
            history = np.concatenate([history, turn.token_ids, [number]])
        _tell(Path(question.columns["file"]), turns)
        return policy.episode()

    async def grade(
        self, question: Question, episodes: Sequence[Episode], services: Services
    ) -> list[Verdict]:
        return [Verdict.scored(n) for n in range(len(episodes))]


def _tell(path: Path, turns: Sequence[tuple[float, float]]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(turns) + "\n")
