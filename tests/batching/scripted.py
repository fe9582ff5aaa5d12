"""Stand-ins for the cluster's services, in an event loop whose clock jumps to what happens next."""

import asyncio
import selectors
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from async_grpo.bundles import CallTaker
from async_grpo.types import (
    Episode,
    Lease,
    Question,
    RegistryStatus,
    Sample,
    Turn,
    Verdict,
    VersionSpan,
)

LIMIT_S = 3600.0  # of jumping time: a test that takes longer hangs


class _Jump(selectors.DefaultSelector):
    """Instead of waiting for the next timer, the time is moved to it."""

    now_s = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("everybody waits and nothing is scheduled")
        self.now_s += max(timeout, 0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self):
        return self._jump.now_s


def run(scenario, *, limit_s=LIMIT_S):
    """What the coroutine returns; sleeping costs no time."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        # Not Runner.run: its signal handler costs a repr of everything that the scenario returns.
        return runner.get_loop().run_until_complete(asyncio.wait_for(scenario, limit_s))


class Handle:
    """An actor handle: `handle.method.remote(...)` is the coroutine of the object's method."""

    def __init__(self, actor):
        self._actor = actor
        self._taker = None

    def __getattr__(self, name):
        if name == "take_calls":
            self._taker = self._taker or CallTaker(self._actor)
            return SimpleNamespace(remote=self._taker.take)
        return SimpleNamespace(remote=getattr(self._actor, name))


class Registry:
    """Grants leases on its workers in turn; a test may revoke some."""

    def __init__(self, *workers):
        self.workers = workers
        self.asked = []  # (cost, version) of every lease
        self.open = set()
        self.revoked = set()  # silently: only a release tells
        self.ended = {}  # lease id -> what those hear who wait for its end
        self.num_tokens = 0

    async def acquire(self, cost, version, timeout_s):
        lease_id = len(self.asked)
        self.asked.append((cost, version))
        self.open.add(lease_id)
        number = lease_id % len(self.workers)
        return Lease(lease_id, self.name(number), Handle(self.workers[number]), cost, version)

    async def until_revoked(self, lease_id):
        return await self._end(lease_id)

    def revoke(self, lease_id, reason):
        self.revoked.add(lease_id)
        self._end(lease_id).set_result(reason)

    def _end(self, lease_id):
        return self.ended.setdefault(lease_id, asyncio.get_running_loop().create_future())

    async def release(self, lease_id):
        self.open.remove(lease_id)
        return lease_id not in self.revoked

    async def status(self):
        return RegistryStatus(1, len(self.workers), len(self.open), None, {}, self.num_tokens)

    def name(self, number):
        return f"w{number}"


def make_question(num_tokens=3):
    return Question(np.arange(num_tokens, dtype=np.int32), "2+2=", "4", {})


def make_completion(version, *, num_tokens=4, finish_reason="stop", spans=None, logprob=-0.5):
    return Turn(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.full(num_tokens, logprob, dtype=np.float32),
        weights_versions=spans or (VersionSpan(version, 0, num_tokens),),
        finish_reason=finish_reason,
        text="four",
    )


def make_verdict(reward, *, status="scored", format_reward=None, reason="", cause="", place=""):
    return Verdict(status, reward, format_reward, "scripted", reason, 0.1, cause, place)


def make_sample(
    version,
    *,
    ordinal=0,
    index=0,
    reward=1.0,
    advantage=0.5,
    verdict=None,
    num_masked=0,
    overlong_penalty=0.0,
    kl_penalty=0.0,
    scores=None,
    **kwargs,
):
    question, turn = make_question(), make_completion(version, **kwargs)
    episode = Episode.of_turn(question.input_token_ids, turn)
    (row,) = episode.rows
    mask = np.arange(len(row.token_ids)) >= num_masked
    return Sample(
        ordinal,
        index,
        question,
        replace(episode, rows=(replace(row, loss_mask=mask),)),
        verdict or make_verdict(reward),
        advantage,
        scores or {},
        overlong_penalty,
        kl_penalty,
    )
