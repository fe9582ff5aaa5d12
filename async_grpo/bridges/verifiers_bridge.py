"""Plays the tasks of a `verifiers` taskset for async-grpo, in the Python where those are installed.

It imports nothing but `verifiers` and what that brings. Options are those of `vf-eval`:

    PYTHON verifiers_bridge.py tasks FILE.jsonl TASKSET [options]    the taskset as questions
    PYTHON verifiers_bridge.py serve TASKSET [options]               what an environment worker runs

`serve` answers lines of JSON: {"id", "task", "base_url", "session"} is one episode, whose model
answers at `base_url` to what carries `session` as its X-Session-ID, and the key of the variable
`KEY_VARIABLE`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, TextIO

Asked = dict[str, Any]  # an episode, or its end, in JSON
KEY_VARIABLE = "ASYNC_GRPO_SESSION_API_KEY"  # no program of an episode inherits such names
ONE_PLAYER = (
    "exactly one agent run of an episode must be trained, and played once: pin the others (their "
    "`trainable`), leave retries at 0, async-grpo plays failed episodes again"
)


def parsed(options: list[str]) -> object:
    """`vf-eval`'s configuration of these options; ends the process with its own words."""
    from pydantic_config import cli
    from verifiers.v1.cli.resolve import narrow_config, plugin_errors, with_positional_taskset
    from verifiers.v1.configs.cli.eval import EvalConfig

    options = with_positional_taskset(options)
    with plugin_errors():
        sys.argv = [sys.argv[0], *options]
        return cli(narrow_config(EvalConfig, options))


def write_tasks(path: str, config: Any) -> None:
    """One line a task: the whole of it, and its prompt for people."""
    import verifiers.v1 as vf

    num_tasks, place = 0, Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("w") as file:
        for task in vf.load_taskset(config.env.taskset).select(config.select):
            data = task.data.model_dump(mode="json", exclude_defaults=True)
            line = {"input": task.data.prompt_text or task.data.name or task.key, "task": data}
            file.write(json.dumps(line) + "\n")
            num_tasks += 1
    print(f"wrote {num_tasks} tasks to {path}")  # noqa: T201 - a command's own answer


class Episodes:
    """Those that are played now."""

    def __init__(self, config: Any, answers: TextIO) -> None:
        import verifiers.v1 as vf

        self._vf = vf
        self._config = config
        self.env = vf.load_environment(config.env)
        self._task = type(self.env.taskset).task_type()
        self._answers = answers
        self._playing: dict[int, asyncio.Task[None]] = {}

    def take(self, asked: Asked) -> None:
        """Begin an episode, or end it."""
        number = asked["id"]
        if asked.get("cancel"):
            if playing := self._playing.get(number):
                playing.cancel()
            return
        self._playing[number] = asyncio.create_task(self._answer(asked))
        self._playing[number].add_done_callback(lambda _: self._playing.pop(number))

    async def end(self) -> None:
        """Nobody waits for any of them."""
        playing = list(self._playing.values())
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    def say(self, answer: dict[str, object]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    async def _answer(self, asked: Asked) -> None:
        try:
            answer = outcome(await self._play(asked))
        except Exception as error:
            answer = {"errors": [[type(error).__name__, str(error)]]}
        self.say({"id": asked["id"], **answer})

    async def _play(self, asked: Asked) -> object:
        vf, config = self._vf, self._config
        client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=KEY_VARIABLE)
        context = vf.ModelContext(model="policy", client=client, sampling=config.sampling)
        data = self._task.data_type().model_validate(asked["task"])
        minted = []

        def mint(trace: Any) -> None:
            agent = trace.agent
            if agent.trainable:
                minted.append(trace)
                if len(minted) > 1:
                    raise ValueError(ONE_PLAYER)
                trace.id = asked["session"]  # its requests carry it as X-Session-ID
            elif agent.config.client == client:
                raise ValueError(
                    f"agent {agent.name!r} is not trained, and must have a model of its own: give "
                    f"--env.{agent.name}.model and --env.{agent.name}.client.base_url"
                )

        (slot,) = self.env.slots(self._task(data, config.env.taskset.task))
        return await self.env.run_slot(slot, context, on_trace=mint)


def outcome(episode: Any) -> dict[str, object]:
    """What became of an episode: a reward, or the errors that kept it from one."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not episode.ok or len(trained) != 1:
        told = [[error.type, error.message] for error in errors]
        return {"errors": told or [["EnvError", ONE_PLAYER]]}
    rewards = [reward.value for reward in trained[0].rewards.values() if reward is not None]
    if not rewards or not math.isfinite(sum(rewards)):
        return {"errors": [["TaskError", f"it must have finite rewards, got {rewards}"]]}
    return {"reward": sum(rewards)}


async def serve(config: Any) -> None:
    """Until the standard input ends."""
    # What an episode starts or prints must neither read a request nor be taken for an answer.
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    episodes = Episodes(config, answers)
    requests = asyncio.StreamReader(limit=256 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), asked)
    async with episodes.env.serving():
        episodes.say({"ready": True})
        while line := await requests.readline():
            episodes.take(json.loads(line))
        await episodes.end()


def main() -> None:
    """See the top of the file."""
    mode, *options = sys.argv[1:]
    if mode == "tasks":
        path, *options = options
        write_tasks(path, parsed(options))
    else:
        asyncio.run(serve(parsed(options)))


if __name__ == "__main__":
    main()
