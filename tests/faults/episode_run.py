"""A run of episodes with tools, bridges and a judge, any process of which may be killed any time.

Controller, environment workers and servers of tools are real; engines, the judge and what a bridge
leads to are played, the trainer takes what comes and goes on from its cut when the controller is
lost, and a keeper starts again what has died, as dispatchers do.
"""

import asyncio
import itertools
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import ray
import ray.cloudpickle
from scripted import make_question
from scripted_run import make_config

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.ledger import Ledger
from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import CONTROLLER
from async_grpo.config.roles import ENVIRONMENT, GENERATION, judge
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.controller.find import find_or_make_controller
from async_grpo.environments.find import users_environment
from async_grpo.launch.actors import worker_kinds
from async_grpo.types import (
    EndOfStep,
    JudgeAnswer,
    Pulse,
    RunId,
    SamplingContract,
    Turn,
    VersionSpan,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.errors import AsyncGrpoError
from benchmarks import procfs

TIMEOUT_S = 60.0
SETTLED_S = 120.0  # in which a step ends after a kill
KEEP_INTERVAL_S = 0.1
TURN_S = 0.2  # at most
JUDGE = judge("strict")
USERS = f"{Path(__file__).parent}/tool_user.py"
BRIDGED = replace(
    make_question(3),
    dataset_type="bridged",
    columns={"task": {"token_ids": [0, 1, 2], "turns": 4}},
)
CONFIG = make_config(
    batch_size=4,
    num_training_batches=10**6,
    samples_per_question=3,
    max_generation_tokens=4,
    max_tokens_per_gpu=200,
    max_staleness=1,
    judges="strict",
    advantage="grpo",
)
SLOTS = {  # who plays, by name
    "engine-0": GENERATION, "engine-1": GENERATION, "environment-0": ENVIRONMENT,
    "environment-1": ENVIRONMENT, "judge-0": JUDGE,
}  # fmt: skip


def get(reference):
    return Cluster().wait(reference, timeout_s=TIMEOUT_S, who="the actor")


class Played:
    """An engine, or a judge; every answer takes its random time."""

    def __init__(self, worker_id):
        self._worker_id, self._random = worker_id, np.random.default_rng()

    async def load_weights(self, snapshot):
        self._version = snapshot.version
        return WeightsAck(self._worker_id, snapshot.version, 0.0, 0.0)

    async def abort_all(self):
        pass

    async def until_death(self):
        """It plays the run's witness too."""
        await asyncio.Future()

    async def ping(self, after_s=0.0):
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def generate(self, request):
        version = self._version
        await asyncio.sleep(self._random.random() * TURN_S)
        ids = self._random.integers(5, 50, size=self._random.integers(1, 5)).astype(np.int32)
        spans = (VersionSpan(version, 0, len(ids)),)
        return (Turn(ids, -np.ones(len(ids), np.float32), spans, "stop", "", self._worker_id),)

    async def answer(self, request):
        await asyncio.sleep(self._random.random() * TURN_S)
        return JudgeAnswer(f"VERDICT: {request.messages[0]['content'].split()[0]}", 3)


def start_played(worker_id):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor = ray.remote(Played).options(num_cpus=0, max_concurrency=1000)
    return actor.remote(worker_id)


class Keeper:
    """Starts workers again when they have died, and registers them with every controller."""

    def __init__(self):
        self._generations = Counter()
        self._known = {}  # name -> the controller that has it
        self._environments = worker_kinds(Cluster(), WorkerConfig(mode=ENVIRONMENT))[0]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep)
        self.workers = {}

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def pids(self, name):
        """Of the processes of a kind that live, where one of it is registered."""
        return [
            Cluster().process_of(self.workers[slot])
            for slot in SLOTS
            if slot.startswith(name) and slot in self._known and self._is_alive(slot)
        ]

    def _is_alive(self, slot):
        pid = Cluster().process_of(self.workers[slot])
        return not pid or procfs.is_running(pid)

    def _keep(self):
        while not self._ended.wait(KEEP_INTERVAL_S):
            try:
                controller = find_or_make_controller(Cluster())
                for slot, role in SLOTS.items():
                    self._keep_one(slot, role, controller)
            except AsyncGrpoError:  # somebody has died meanwhile: looked at again
                continue

    def _keep_one(self, slot, role, controller):
        if slot not in self.workers or not self._is_alive(slot):
            self._known.pop(slot, None)
            self._generations[slot] += 1
            name = f"{slot}-{self._generations[slot]}"
            start = self._environments.start if role == ENVIRONMENT else start_played
            self.workers[slot] = start(name)
        if self._known.get(slot) != controller:
            worker = self.workers[slot]
            name = f"{slot}-{self._generations[slot]}"
            info = WorkerInfo(name, role, "node", 1, "model", 64, 64.0, 0.0, 512)
            if role == ENVIRONMENT:
                info = get(worker.info.remote())
            get(controller.register.remote(info, worker))
            self._known[slot] = controller


class Trainer:
    """One rank: takes items, commits whole steps, and goes on from its cut."""

    def __init__(self):
        self._witness = start_played("witness")
        self.cut, self.keys, self.failed, self.num_steps = None, Counter(), Counter(), 0
        self.num_recoveries = -1
        self._plan = BatcherPlan(
            config=CONFIG,
            questions=(make_question(3), BRIDGED) * 2,
            held_out=(),
            order=abs_of_four,
            replacement=max,
            seed_of=None,
            sampling=SamplingContract(1.0, (1,), 4),
            num_ranks=1,
            incarnation=7,
            rules=LocalRules(find_algorithm(CONFIG)),
            environment=users_environment(f"{USERS}:ToolUser"),
            environments={"bridged": users_environment(f"{USERS}:Bridged")},
            max_positions=200,
        )

    def train(self, ended):
        """Until the end of a batch at which `ended` is set."""
        while True:
            self.num_recoveries += 1
            try:
                controller, run = self._begin()
                for index in itertools.count():
                    if self._step(controller, run, index) and ended.is_set():
                        return
            except AsyncGrpoError as error:  # the controller is lost
                last = error
                time.sleep(KEEP_INTERVAL_S)
            assert self.num_recoveries < 200, last

    def _begin(self):
        self._taken = []
        controller = find_or_make_controller(Cluster())
        plan = replace(self._plan, resume=self.cut)
        run = RunId(7, get(controller.begin_run.remote(plan, self._witness, None)))
        self._publish(controller, run, self.cut.batch if self.cut else 0)
        return controller, run

    def _publish(self, controller, run, batches):
        version = WeightsVersion(7, batches)
        get(controller.publish.remote(run, WeightsSnapshot(version, ()), (GENERATION,), 30.0))
        get(controller.published.remote(run, version))

    def _step(self, controller, run, index):
        """One answer; whether it ends a batch."""
        get(controller.heard.remote(run))
        asked = controller.next_items.remote(run, 0, index)
        controller.hungry.remote(run, index)
        for item in get(asked):
            if not isinstance(item, EndOfStep):
                self._taken += [(each.ordinal, each.index) for each in item.samples]
                continue
            self.keys.update(self._taken)
            self.failed.update({r: n for r, n in item.reasons.items() if r.startswith("failed")})
            self._taken, self.cut, self.last = [], item.resume, item
            self.num_steps += 1
            self._publish(controller, run, item.batch + 1)
            return True
        return False


def abs_of_four(ordinal):
    return ordinal % 4


class Killer:
    """Kills one kind after the other, each when the run has gone on since the one before."""

    def __init__(self, keeper, trainer, *, seed):
        self._keeper, self._trainer, self._random = keeper, trainer, random.Random(seed)
        self.killed = Counter()
        self.kinds = {  # the processes of each: another kind is another line
            "engine": lambda: keeper.pids("engine"),
            "environment worker": lambda: keeper.pids("environment"),
            "bridge": lambda: self._children("stand_in_bridge.py"),
            "tool server": lambda: self._children("tool_server.py"),
            "judge": lambda: keeper.pids("judge"),
            "controller": self._controllers,
        }

    def kill(self, num_kills):
        """So many in all."""
        deck = [list(self.kinds) for _ in range(-(-num_kills // len(self.kinds)))]
        for kinds in deck:
            self._random.shuffle(kinds)
        for kind in list(itertools.chain(*deck))[:num_kills]:
            self._await_steps(1)
            time.sleep(self._random.uniform(0.0, 1.5))
            procfs.send([self._victim(kind)], 9)
            self.killed[kind] += 1
        self._await_steps(2)

    def _victim(self, kind):
        deadline = time.monotonic() + SETTLED_S
        while not (pids := self.kinds[kind]()):
            assert time.monotonic() < deadline, f"nobody is a {kind}"
            time.sleep(KEEP_INTERVAL_S)
        return self._random.choice(pids)

    def _await_steps(self, number):
        deadline, wanted = time.monotonic() + SETTLED_S, self._trainer.num_steps + number
        while self._trainer.num_steps < wanted:
            assert time.monotonic() < deadline, f"no step has ended since {dict(self.killed)}"
            time.sleep(KEEP_INTERVAL_S)

    def _children(self, file):
        children = itertools.chain(*map(procfs.children, self._keeper.pids("environment")))
        return [pid for pid in children if file in procfs.command_line(pid)]

    def _controllers(self):
        controller = Cluster().find_actor(CONTROLLER)
        pid = Cluster().process_of(controller) if controller else 0
        return [pid] if pid and procfs.is_running(pid) else []


def books(trainer):
    """(samples that are lost, samples that are doubled) of all batches that have ended."""
    num_slots = trainer.cut.batch * CONFIG.batching.batch_size
    due = set(itertools.product(range(num_slots), range(CONFIG.sampling.samples_per_question)))
    ledger = Ledger.restore(trainer.cut.ledger)  # which raises where it does not balance
    num_trained = ledger.fates.samples["trained"]
    assert set(trainer.keys) <= due and num_trained == trainer.keys.total()
    lost = len(due) - len(trainer.keys) - trainer.failed.total()
    lost -= ledger.fates.samples["zero_contribution"]
    return lost, trainer.keys.total() - len(trainer.keys)
