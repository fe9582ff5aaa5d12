"""Plays the tasks of a `verifiers` taskset for async-grpo, in the Python that has `verifiers`.

The taskset is installed there too, async-grpo is not: this file imports the standard library,
`verifiers` and its dependencies only. Options are those of `vf-eval`:

    PYTHON verifiers_bridge.py tasks FILE.jsonl TASKSET [options]    the taskset as questions
    PYTHON verifiers_bridge.py serve TASKSET [options]               what an environment worker runs

`serve` answers lines of JSON. {"id", "task", "base_url", "session"} asks for one episode: its
requests for the model go to `base_url`, with `session` as their X-Session-ID and the key in the
environment variable `KEY_VARIABLE`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, TextIO

Request = dict[str, Any]  # JSON: to play an episode, or to cancel it
KEY_VARIABLE = "ASYNC_GRPO_SESSION_API_KEY"  # verifiers keeps such names from an episode's programs
ONE_PLAYER = (
    "exactly one agent run of an episode must be trained, and played once: pin the others (their "
    "`trainable`), leave retries at 0, async-grpo plays failed episodes again"
)


def parsed(options: list[str]) -> object:
    """The configuration that `vf-eval` reads from options; for wrong ones it ends the process."""
    from pydantic_config import cli
    from verifiers.v1.cli.resolve import narrow_config, plugin_errors, with_positional_taskset
    from verifiers.v1.configs.cli.eval import EvalConfig

    options = with_positional_taskset(options)
    with plugin_errors():
        sys.argv = [sys.argv[0], *options]
        return cli(narrow_config(EvalConfig, options))


def write_tasks(path: str, config: Any) -> None:
    """Write each task as a line of JSON: the whole task, and its prompt for readers."""
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
    """The episodes that are played now."""

    def __init__(self, config: Any, answers: TextIO) -> None:
        import verifiers.v1 as vf

        self._vf = vf
        self._config = config
        self.env = vf.load_environment(config.env)
        self._task = type(self.env.taskset).task_type()
        self._answers = answers
        self._playing: dict[int, asyncio.Task[None]] = {}

    def take(self, request: Request) -> None:
        """Begin an episode, or cancel it."""
        number = request["id"]
        if request.get("cancel"):
            if playing := self._playing.get(number):
                playing.cancel()
            return
        self._playing[number] = asyncio.create_task(self._answer(request))
        self._playing[number].add_done_callback(lambda _: self._playing.pop(number))

    async def end(self) -> None:
        """Cancel all episodes, and wait until they have ended."""
        playing = list(self._playing.values())
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    def send(self, answer: dict[str, object]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    async def _answer(self, request: Request) -> None:
        try:
            answer = outcome(await self._play(request))
        except Exception as error:
            answer = {"errors": [[type(error).__name__, str(error)]]}
        self.send({"id": request["id"], **answer})

    async def _play(self, request: Request) -> object:
        vf, config = self._vf, self._config
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=KEY_VARIABLE)
        context = vf.ModelContext(model="policy", client=client, sampling=config.sampling)
        data = self._task.data_type().model_validate(request["task"])
        minted = []

        def mint(trace: Any) -> None:
            agent = trace.agent
            if agent.trainable:
                minted.append(trace)
                if len(minted) > 1:
                    raise ValueError(ONE_PLAYER)
                trace.id = request["session"]  # its requests carry it as X-Session-ID
            elif agent.config.client == client:
                raise ValueError(
                    f"agent {agent.name!r} is not trained, and must have a model of its own: give "
                    f"--env.{agent.name}.model and --env.{agent.name}.client.base_url"
                )

        (slot,) = self.env.slots(self._task(data, config.env.taskset.task))
        return await self.env.run_slot(slot, context, on_trace=mint)


def outcome(episode: Any) -> dict[str, object]:
    """The reward of an episode that has ended, or its errors."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not episode.ok or len(trained) != 1:
        plain = [[error.type, error.message] for error in errors]
        return {"errors": plain or [["EnvError", ONE_PLAYER]]}
    rewards = [reward.value for reward in trained[0].rewards.values() if reward is not None]
    if not rewards or not math.isfinite(sum(rewards)):
        return {"errors": [["TaskError", f"it must have finite rewards, got {rewards}"]]}
    return {"reward": sum(rewards)}


async def serve(config: Any) -> None:
    """Answer requests until the standard input ends."""
    # Neither may an episode or its programs read a request as stdin, nor may their prints to stdout
    # be taken for answers.
    source, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    episodes = Episodes(config, answers)
    requests = asyncio.StreamReader(limit=256 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), source)
    async with episodes.env.serving():
        episodes.send({"ready": True})
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
