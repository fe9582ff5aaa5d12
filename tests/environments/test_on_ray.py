"""A run whose episodes are played by an environment worker, through a real controller."""

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import ray
from local_ray import local_ray
from scripted import make_question
from scripted_run import make_config

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.ledger import FATES
from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.cluster import Cluster
from async_grpo.config.roles import ENVIRONMENT, GENERATION
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.controller.find import find_or_make_controller
from async_grpo.environments.find import users_environment
from async_grpo.launch.actors import worker_kinds
from async_grpo.launch.dispatcher import Workers
from async_grpo.types import (
    EndOfStep,
    Minibatch,
    Pulse,
    RunId,
    SamplingContract,
    Turn,
    VersionSpan,
    WeightsAck,
    WeightsBucket,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.errors import AsyncGrpoError

pytestmark = pytest.mark.integration
HERE = Path(__file__).parent
CONFIG = make_config(
    batch_size=4, num_training_batches=1, samples_per_question=4, max_tokens_per_gpu=64
)


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray(num_cpus=2, namespace="test"):
        yield


def get(reference):
    return Cluster().wait(reference, timeout_s=60, who="the actor")


def engine_class():
    class Engine:  # local: Ray then sends its code, instead of a name that it cannot import
        def __init__(self, worker_id):
            self._worker_id, self._rng = worker_id, np.random.default_rng()
            self.asked = []

        async def load_weights(self, snapshot):
            self._version = snapshot.version
            return WeightsAck("", snapshot.version, 0.0, 0.0)

        async def abort_all(self):
            pass

        async def ping(self, after_s=0.0):
            await asyncio.sleep(after_s)
            return Pulse("7.0")

        async def histories(self):
            return self.asked

        async def generate(self, request):
            self.asked.append(request.input_token_ids.tolist())
            ids = self._rng.integers(5, 50, size=3).astype(np.int32)
            spans = (VersionSpan(self._version, 0, 3),)
            return (Turn(ids, -np.ones(3, np.float32), spans, "stop", "", self._worker_id),)

    return Engine


def witness_class():
    class Witness:
        async def until_death(self):
            await asyncio.Future()

    return Witness


def make(actor_class, *arguments):
    return ray.remote(actor_class).options(num_cpus=0, max_concurrency=100).remote(*arguments)


def start_environment_worker(controller):
    config = WorkerConfig(mode=ENVIRONMENT)
    (kind,) = worker_kinds(Cluster(), config)
    worker = kind.start("e0")
    get(controller.register.remote(get(worker.info.remote()), worker))
    return worker


def make_plan(environment, *, incarnation, **options):
    return BatcherPlan(
        config=CONFIG,
        questions=tuple(make_question(3) for _ in range(4)),
        held_out=(make_question(3), make_question(4)),
        order=abs,  # functions that every process knows
        replacement=max,
        seed_of=None,
        sampling=SamplingContract(1.0, (1,), 12),
        num_ranks=1,
        incarnation=incarnation,
        rules=LocalRules(find_algorithm(CONFIG)),
        environment=users_environment(environment),
        max_positions=64,
        **options,
    )


def begin(controller, plan):
    """The run, with weights to sample from."""
    witness = make(witness_class())
    run = RunId(plan.incarnation, get(controller.begin_run.remote(plan, witness, None)))
    version = WeightsVersion(plan.incarnation, 0)
    snapshot = WeightsSnapshot(version, (WeightsBucket((), ray.put(0), 0, 0),))
    get(controller.publish.remote(run, snapshot, (GENERATION,), 30.0))
    get(controller.published.remote(run, version))
    return run, witness


@pytest.fixture
def engines():
    return {name: make(engine_class(), name) for name in ("one", "two")}


@pytest.fixture
def controller(engines):
    controller = find_or_make_controller(Cluster())
    for name, engine in engines.items():
        info = WorkerInfo(name, GENERATION, "node", 1, "model", 64, 64.0, 0.0, 512)
        get(controller.register.remote(info, engine))
    environment = start_environment_worker(controller)
    yield controller
    for actor in (environment, *engines.values(), controller):
        ray.kill(actor)


def test_every_turn_of_a_run_comes_through_the_controller_from_the_engine_of_its_prefix(
    controller, engines
):
    plan = make_plan(f"{HERE}/two_turns.py:TwoTurns", incarnation=7)
    run, _witness = begin(controller, plan)
    parts, deadline = [], time.monotonic() + 60
    for index in range(100):
        assert time.monotonic() < deadline
        items = get(controller.next_items.remote(run, 0, index))
        parts += [s for item in items if isinstance(item, Minibatch) for s in item.samples]
        if isinstance(items[-1], EndOfStep):
            break
    assert items[-1].num_samples == 16
    sampled = {}
    for part in parts:
        (row,) = part.episode.rows
        assert row.num_sampled_tokens == row.num_trained_tokens in (3, 6)
        sampled[part.ordinal, part.index] = row
    (held_out,) = items[-1].evaluations or get(controller.evaluated.remote(run))
    assert (held_out.num_samples, held_out.num_failed) == (8, 0)
    assert held_out.reward_sum != held_out.num_correct  # by the environment's own verdicts
    histories = {name: get(engine.histories.remote()) for name, engine in engines.items()}
    num_sampled = 3 * sum(map(len, histories.values()))
    num_sampled -= sum(each.num_tokens for each in held_out.questions)
    tokens = dict(items[-1].tokens)
    assert tokens.pop("trained") + tokens.pop("zero_contribution") == num_sampled
    assert not any(tokens.values()) and tokens.keys() < {*FATES}
    for row in sampled.values():
        if row.num_trained_tokens == 6:
            whole = [*row.prompt_token_ids.tolist(), *row.token_ids.tolist()]
            first = [name for name, asked in histories.items() if whole[:3] in asked]
            assert any(whole[:-3] in histories[name] for name in first)


SERVICE = """
import asyncio
from async_grpo.environments.service import Service
class Index(Service):
    capacity = 4
    async def answer(self, request):
        await asyncio.sleep(0.1)
        return request
"""
ASKS = """
from two_turns import TwoTurns
class Asks(TwoTurns):
    async def play(self, question, policy, services):
        episode = await super().play(question, policy, services)
        tokens = episode.turns[0].token_ids
        assert (await services["index"](tokens)).tolist() == tokens.tolist()
        return episode
"""


def test_a_service_that_is_killed_is_started_again_and_what_it_was_asked_is_asked_again(
    controller, tmp_path
):
    (tmp_path / "two_turns.py").write_text((HERE / "two_turns.py").read_text())
    (tmp_path / "asks.py").write_text(ASKS)
    (tmp_path / "index.py").write_text(SERVICE)
    config, killed = WorkerConfig(mode=f"{tmp_path}/index.py:Index"), None
    with Workers(worker_kinds(Cluster(), config), config, Cluster()) as workers:
        while not (members := get(controller.members.remote(config.role))):
            workers.check()
        (tmp_path / "index.py").unlink()  # its text was read, once
        run, _witness = begin(controller, make_plan(f"{tmp_path}/asks.py:Asks", incarnation=7))
        index, items, deadline = 0, (), time.monotonic() + 60
        while not (items and isinstance(items[-1], EndOfStep)):
            call = controller.next_items.remote(run, 0, index)
            while not ray.wait([call], timeout=0.05)[0]:
                assert time.monotonic() < deadline
                workers.check()
                standing = get(controller.standing.remote({config.role: [members[0].worker_id]}))
                if not killed and standing[members[0].worker_id].num_leases:
                    killed = members[0]
                    os.kill(killed.pid, signal.SIGKILL)
            items, index = get(call), index + 1
        assert killed and items[-1].num_samples == 16
        fates = Counter(items[-1].fates)
        assert fates["trained"] + fates["zero_contribution"] == 16
        (other,) = get(controller.members.remote(config.role))
        assert other.worker_id != killed.worker_id and other.code == killed.code
        counts = get(controller.counts.remote(config.role))
        assert counts["fenced: died"] == 1 and counts["revoked: died"] >= 1


START = """
from dataclasses import replace
import numpy as np
from two_turns import TwoTurns
class Bad(TwoTurns):
    async def play(self, question, policy, services):
        turn = await policy.sample(question.input_token_ids, max_tokens=4)
        await policy.sample([*question.input_token_ids, *turn.token_ids, 60], max_tokens=4)
        episode = policy.episode()
        (row,) = episode.rows
"""
NONE = "none of (?:batch 1|the held-out questions) could be: "  # they are played side by side
BAD = {
    "import no_such_module\n": r"bad.py cannot be imported: ModuleNotFoundError\(",
    "Bad = 3\n": "bad.py:Bad must be a class derived from Environment, got 3",
    START + "    def __init__(self): open('/no/such/index')\n": (
        r"bad.py:Bad cannot be made, FileNotFoundError\(.*/bad.py:\d+, def __init__"
    ),
    START + "        raise KeyError('colour')\n": (
        NONE + r"environment .*bad.py:Bad of question \d raised "
        r"KeyError\('colour'\) at .*bad.py:\d+, raise KeyError"
    ),
    START
    + "        return replace(episode, rows=(replace(row, token_ids=row.token_ids + 1),))\n": (
        r"policy.episode\(\).*the tokens of row 0 are others, or do not extend its prompt"
    ),
    START + "        mask = np.ones(len(row.token_ids), bool)\n"
    "        return replace(episode, rows=(replace(row, loss_mask=mask),))\n": (
        "row 0 would train 1 tokens that the model only read"
    ),
    START + "        return await services.ask('sandbox', 'run', None)\n": (
        "a role must be one of generation, .*, got 'sandbox'"
    ),
    START + "        return await services.ask_judge('strict', [])\n": (
        "judge 'strict' must be one of --judges '': name it there"
    ),
    START + "        return await services['sandbox'](episode.turns[0].text)\n": (
        r"a service must be one of those that have had a worker, got services\['sandbox'\]: correct"
    ),
    START + "        import sys; sys.exit(3)\n": (NONE + r".*end of its process: SystemExit\(3\)"),
}


def test_an_environment_that_cannot_work_ends_its_run_in_a_sentence_and_nothing_else(
    controller, tmp_path
):
    path = tmp_path / "bad.py"
    (tmp_path / "two_turns.py").write_text((HERE / "two_turns.py").read_text())
    for number, (text, said) in enumerate(BAD.items(), start=8):
        path.write_text(text)
        run, witness = begin(controller, make_plan(f"{path}:Bad", incarnation=number))
        with pytest.raises(AsyncGrpoError, match=said) as caught:
            get(controller.next_items.remote(run, 0, 0))
        assert "Traceback" not in str(caught.value) and len(str(caught.value)) < 1500
        get(controller.end_run.remote(run))
        ray.kill(witness)
