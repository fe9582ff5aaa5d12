"""A text game of many turns: find the treasure in a house, in few moves.

async-grpo-worker --mode environment
async-grpo train --environment examples/treasure_hunt.py:TreasureHunt ...

A question's line has a `seed`, which alone decides the house, and may have `rooms` (6).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.environments.base import Environment, Policy, Services
from async_grpo.types import Episode, Question, Verdict

RULES = (
    "You are in a house of {rooms} rooms, and look for a treasure. Each turn write one command: "
    "`go N` to walk through the door to room N, or `take`. You have {moves} moves.\n\n{scene}"
)
COMMAND = re.compile(r"\b(?:go (\d+)|(take))\b")


@dataclass(frozen=True)
class House:
    """Rooms from 1 on, and the doors between them: a tree, so that every room is reached."""

    doors: dict[int, tuple[int, ...]]
    treasure: int

    @classmethod
    def of(cls, seed: int, rooms: int) -> House:
        """The house of a seed, the same everywhere."""
        rng = random.Random(seed)
        doors: dict[int, set[int]] = {room: set() for room in range(1, rooms + 1)}
        for room in range(2, rooms + 1):
            other = rng.randrange(1, room)
            doors[room].add(other)
            doors[other].add(room)
        treasure = rng.randrange(2, rooms + 1)
        return cls({room: tuple(sorted(others)) for room, others in doors.items()}, treasure)

    def scene(self, room: int) -> str:
        """What is seen in a room."""
        doors = ", ".join(map(str, self.doors[room]))
        shine = " Something shines here." if room == self.treasure else ""
        return f"You are in room {room}, with doors to {doors}.{shine}"

    def after(self, text: str, room: int) -> tuple[int, str, bool]:
        """The room after what the model wrote, what it reads, and whether it has won."""
        commands = COMMAND.findall(text)
        if not commands:
            return room, "Write `go N` or `take`.", False
        number, take = commands[-1]
        if take:
            has_won = room == self.treasure
            return room, "You have the treasure." if has_won else "There is nothing here.", has_won
        if not (len(number) < 10 and int(number) in self.doors[room]):
            return room, f"There is no door to {number[:9]}. {self.scene(room)}", False
        return int(number), self.scene(int(number)), False


class TreasureHunt(Environment):
    """The reward is 1 for the treasure; mistakes cost moves, and nothing else."""

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        house, moves = _house(question)
        dialogue, room = await services.dialogue(), 1
        rules = RULES.format(rooms=len(house.doors), moves=moves, scene=house.scene(room))
        messages: list[Any] = [{"role": "user", "content": rules}]
        for _ in range(moves):
            reply = await dialogue.reply(policy, messages)
            said = f"{reply.reasoning}\n{reply.content}"  # as `grade` reads it again
            room, heard, has_won = house.after(said, room)
            if has_won:
                break
            messages += [reply.message(), {"role": "user", "content": heard}]
        return policy.episode()

    async def grade(
        self, question: Question, episodes: Sequence[Episode], services: Services
    ) -> list[Verdict]:
        house, _ = _house(question)
        graded = []
        for episode in episodes:
            room, has_won = 1, False
            for turn in episode.turns:
                room, _, has_won = house.after(turn.text, room)
            graded.append(Verdict.scored(has_won, adapter="treasure"))
        return graded


def _house(question: Question) -> tuple[House, int]:
    """The house, and as many moves as visit all its rooms and come back."""
    rooms = int(question.columns.get("rooms", 6))
    return House.of(int(question.columns["seed"]), rooms), 2 * rooms
