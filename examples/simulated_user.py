"""A user whom a judge's model plays, and who says at the end whether the help was good.

async-grpo-worker --mode judge --name user --model-path USER_MODEL
async-grpo-worker --mode environment
async-grpo train --judges user --environment examples/simulated_user.py:SimulatedUser ...

A question is what the user wants; the model that is trained never reads it, but what the user says.
"""

from collections.abc import Sequence
from typing import Any

from async_grpo.environments.base import Environment, Policy, Services
from async_grpo.environments.judging import score
from async_grpo.types import Episode, Question, Verdict

USER = (
    "You play a user who talks to an assistant. What you want: {want}\n"
    "Write only what the user says next, in one or two sentences. Write DONE when you have it."
)
GRADE = (
    "A user wanted: {want}\n\nAn assistant said, turn by turn:\n\n{said}\n\nHow well did it help?"
)


class SimulatedUser(Environment):
    """The user has the first word; the reward is the user's score, from 0 to 1."""

    judge = "user"
    max_turns = 6

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        dialogue = await services.dialogue()
        role = {"role": "system", "content": USER.format(want=question.input)}
        messages: list[Any] = []
        for _ in range(self.max_turns):
            said = await services.ask_judge(self.judge, [role, *_as_the_user(messages)])
            if messages and "DONE" in said:
                break
            messages.append({"role": "user", "content": said})
            messages.append((await dialogue.reply(policy, messages)).message())
        return policy.episode()

    async def grade(
        self, question: Question, episodes: Sequence[Episode], services: Services
    ) -> list[Verdict]:
        graded = []
        for episode in episodes:
            said = "\n".join(f"Assistant: {turn.text}" for turn in episode.turns)
            asked = [{"role": "user", "content": GRADE.format(want=question.input, said=said)}]
            (points,) = await services.judge([self.judge], asked, form=score(0, 10))
            graded.append(Verdict.scored(points / 10, adapter="user"))
        return graded


def _as_the_user(messages: list[Any]) -> list[Any]:
    """The conversation as its user sees it: whose own words are those of the assistant's role."""
    other = {"user": "assistant", "assistant": "user"}
    greeting = {"role": "user", "content": "Hello, how can I help you?"}
    return [greeting, *({"role": other[m["role"]], "content": m["content"]} for m in messages)]
