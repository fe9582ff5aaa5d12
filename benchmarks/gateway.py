"""What the gateway of a run adds to a turn: a chat over HTTP against a direct call of the engine.

A Ray cluster, a controller and a run of our own; the engine is an actor that answers at once. What
is left is the run's own work: the connection, JSON, rendering, the capture of ids, the lease. One
request at a time, both ways in turn.

    python -m benchmarks.gateway
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
import ray
import ray.cloudpickle

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import ControllerClient
from async_grpo.config.roles import GENERATION
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.find import find_or_make_controller
from async_grpo.environments.chat.find import find_tokenizer
from async_grpo.environments.chat.template import TemplateRenderer
from async_grpo.gateway.run_gateway import ADDRESS_FILE, free_address, start_gateway
from async_grpo.run.companions import start_witness
from async_grpo.types import (
    GenerationRequest,
    Pulse,
    Question,
    RunId,
    SamplingContract,
    Turn,
    VersionSpan,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from benchmarks import results, stack
from benchmarks.results import Figure, median

NAME = "gateway"
MODEL = str(Path(__file__).parent.parent / "sample-data" / "tiny-countdown")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "use 2 9 8 to make 15"}] * 8
NUM_OUTPUT = 64  # tokens
LONGEST = 4096  # prompt and output, in tokens
MAX_ADDED_MS = 10.0
INCARNATION = 7
TIMEOUT_S = 60.0


class InstantEngine:
    """Answers at once, each time other tokens; a generation worker to the controller."""

    def __init__(self, worker_id: str = "instant") -> None:
        self.worker_id = worker_id
        self.version = WeightsVersion(0, 0)
        self._num = 0

    async def ping(self, after_s: float = 0.0) -> Pulse:
        await asyncio.sleep(after_s)
        return Pulse(str(self.version))

    async def load_weights(self, snapshot: WeightsSnapshot) -> WeightsAck:
        self.version = snapshot.version
        return WeightsAck(self.worker_id, snapshot.version, 0.0, 0.0)

    async def abort_all(self) -> None:
        return None

    async def generate(self, request: GenerationRequest) -> tuple[Turn, ...]:
        self._num += 1
        return (self.turn((np.arange(NUM_OUTPUT) * 7 + self._num) % 90 + 10),)

    def turn(self, token_ids: Any) -> Turn:
        """Of these tokens."""
        ids, logprobs = np.asarray(token_ids, np.int32), -np.ones(len(token_ids), np.float32)
        spans = (VersionSpan(self.version, 0, len(ids)),)
        return Turn(ids, logprobs, spans, "length", "", self.worker_id)


@dataclass(frozen=True, slots=True, eq=False)
class ServedRun:
    """A run that trains nothing, behind its gateway."""

    url: str
    token: str
    gateway: Any
    controller: Any
    id: RunId
    begin_again: Callable[[], RunId]  # at another controller


@contextmanager
def served(model: str, output: Path, engines: Mapping[str, Any]) -> Iterator[ServedRun]:
    """A run in this Ray cluster, whose engines are these actors."""
    config = TrainConfig(
        model_name_or_path=model, data_path="none", output_dir=str(output), gateway="0"
    )
    plan = BatcherPlan(
        config=config,
        questions=(Question(np.arange(3, dtype=np.int32), "2+2=", "4", {}),),
        held_out=(),
        order=abs,
        replacement=max,
        seed_of=None,
        sampling=SamplingContract(1.0, (1,), NUM_OUTPUT),
        num_ranks=1,
        incarnation=INCARNATION,
        rules=LocalRules(find_algorithm(config)),
    )
    witness = start_witness(Cluster())

    def begin() -> RunId:
        controller = find_or_make_controller(Cluster())
        run = RunId(plan.incarnation, get(controller.begin_run.remote(plan, witness, None)))
        for name, engine in engines.items():
            info = WorkerInfo(name, GENERATION, "node", 0, "model", 128, 4.0, 0.0, LONGEST)
            get(controller.register.remote(info, engine))
        snapshot = WeightsSnapshot(WeightsVersion(plan.incarnation, 0), ())
        get(controller.publish.remote(run, snapshot, (GENERATION,), TIMEOUT_S))
        return run

    run, controller = begin(), find_or_make_controller(Cluster())
    address = free_address(config.places)
    assert address is not None
    gateway = start_gateway(plan, ControllerClient(Cluster(), controller), address)
    lines = (output / ADDRESS_FILE).read_text().splitlines()
    url, token = (line.partition("=")[2] for line in lines)
    try:
        yield ServedRun(url.removesuffix("/v1"), token, gateway, controller, run, begin)
    finally:
        ray.kill(gateway)
        ray.kill(find_or_make_controller(Cluster()))


def start_engine(kind: type[Any] = InstantEngine, *arguments: object) -> Any:
    """An actor of that class."""
    return ray.remote(kind).options(num_cpus=0, max_concurrency=1000).remote(*arguments)


def get(reference: Any) -> Any:
    return Cluster().wait(reference, timeout_s=TIMEOUT_S, who="the actor")


def measure(num_requests: int, folder: Path) -> list[Figure]:
    """Milliseconds of a request, and the share of turns that are kept, and end, as they must."""
    tokenizer = find_tokenizer(MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    engine = start_engine()
    prompt = np.array(TemplateRenderer(tokenizer).render(MESSAGES), np.int32)
    request = GenerationRequest(0, 0, prompt, 1, SamplingContract(1.0, (1,), NUM_OUTPUT))
    direct: list[float] = []
    over_http: list[float] = []
    is_kept: list[bool] = []
    is_stopped: list[bool] = []
    with (
        served(str(folder / "model"), folder, {"instant": engine}) as run,
        httpx.Client(base_url=run.url, headers={"Authorization": f"Bearer {run.token}"}) as client,
    ):
        for _ in range(num_requests):
            run.controller.heard.remote(run.id)
            began = time.perf_counter()
            (before,) = get(engine.generate.remote(request))
            direct.append(1e3 * (time.perf_counter() - began))
            sampled = ((before.token_ids - 10 + 1) % 90 + 10).tolist()  # what comes next
            stop = tokenizer.decode(sampled[30:32])
            body = {"model": "any", "messages": MESSAGES, "max_tokens": NUM_OUTPUT}
            began = time.perf_counter()
            client.post("/s/a/v1/chat/completions", json=body).raise_for_status()
            over_http.append(1e3 * (time.perf_counter() - began))
            cut = client.post("/s/a/v1/chat/completions", json=body | {"stop": stop}).json()
            whole, ended = client.get("/s/a/turns").json()["data"]
            is_kept.append(whole["token_ids"] == sampled)
            is_stopped.append(_is_stopped(cut["choices"][0], ended, stop, tokenizer.decode))
            client.delete("/s/a")
    added = [whole - own for whole, own in zip(over_http, direct, strict=True)]
    return [
        median("direct", direct, "ms"),
        median("over HTTP", over_http, "ms"),
        median("added", added, "ms", goal=MAX_ADDED_MS),
        _share("turns whose ids were kept", is_kept),
        _share("stop strings honoured", is_stopped),
    ]


def _is_stopped(choice: Any, turn: Any, stop: str, decode: Any) -> bool:
    """Whether the turn ends with the token that completes the string, which is not shown."""
    ids, shown = turn["token_ids"], choice["message"]["content"]
    ends = stop in decode(ids) and stop not in decode(ids[:-1])
    return ends and shown == decode(ids).partition(stop)[0] and choice["finish_reason"] == "stop"


def _share(name: str, held: Sequence[bool]) -> Figure:
    share = sum(held) / len(held)
    return Figure(name, share, "fraction", better="higher", goal=1.0)


@click.command()
@click.option("--quick", is_flag=True, help="few requests, to show that it runs")
@click.option("--results-dir", default=str(results.FOLDER), help="where the figures go")
def main(quick: bool, results_dir: str) -> None:
    """Measure what the gateway of a run adds to a turn."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with tempfile.TemporaryDirectory() as folder, stack.start(Path(folder)) as running:
        os.environ["RAY_AUTH_MODE"] = running.environment["RAY_AUTH_MODE"]
        Cluster.join(running.environment["RAY_ADDRESS"], namespace=NAME)
        measure(10, Path(folder))  # imports and connections, once
        figures = measure(20 if quick else 500, Path(folder))
        ray.shutdown()
    click.echo("\n" + results.show(figures))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


if __name__ == "__main__":
    main()
