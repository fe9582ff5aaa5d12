"""Stand-ins for the cluster's services, in an event loop whose clock jumps to what happens next."""

import asyncio
import contextlib
import selectors
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from async_grpo.cluster.batched_calls import BatchedCalls
from async_grpo.controller.leases import Lease
from async_grpo.types import (
    Episode,
    Hold,
    Question,
    Sample,
    Turn,
    Verdict,
    VersionSpan,
    WorkerInfo,
)
from async_grpo.util.errors import LeaseLost, LossCause

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


class Reference:
    """One of the objects that a method returns beside its answer; Ray would have it in a store."""


class Handle:
    """An actor handle: `handle.method.remote(...)` is the coroutine of the object's method.

    With `handle.method.options(num_returns=n).remote(...)` there are references beside it.
    """

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        method = getattr(self._actor, name)

        def options(*, num_returns):
            def remote(*args):
                return [method(*args), *(Reference() for _ in range(num_returns - 1))]

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(remote=method, options=options)


class Registry:
    """Grants leases on its workers in turn; a test may end some. A worker that dies comes back."""

    def __init__(self, *workers, role="generation"):
        self.workers, self.role = workers, role
        self.asked = []  # (cost, version) of every lease
        self.holds = []  # of every lease: that of an evaluation, or None
        self.open = {}
        self.revoked = set()  # lease ids that have ended when the answer comes
        self.num_tokens = 0

    @contextlib.asynccontextmanager
    async def lease(
        self, cost, *, version=None, prefer=None, timeout_s, moves=int, terms=None, received=None
    ):
        lease_id = len(self.asked)
        self.asked.append((cost, version))
        self.holds.append(terms and terms.hold)
        number = lease_id % len(self.workers)
        info = WorkerInfo(self.name(number), self.role, "node", 1, "model", 64, 1.0, 0.0, 512)
        handle = Handle(self.workers[number])
        lease = self.open[lease_id] = Lease(
            lease_id, info, BatchedCalls(handle), cost=cost, fence=self.lose
        )
        lease.received = received
        try:
            yield lease
            if lease_id in self.revoked:
                self.revoke(lease_id)
            lease.check()
        finally:
            del self.open[lease_id]
            lease.end()

    @contextlib.contextmanager
    def held(self, version):
        yield Hold(version, "w0" if len(self.workers) > 1 else "")

    def room(self, hold):
        return 64.0

    def take_lost(self):
        return Counter()

    def revoke(self, lease_id, cause=LossCause.SILENT, reason="no sign of life"):
        self.open[lease_id].end(LeaseLost(cause, f"lease {lease_id} has ended: {reason}"))

    def lose(self, worker_id, cause, reason):
        for lease_id, lease in self.open.items():
            if lease.worker_id == worker_id:
                self.revoke(lease_id, cause, reason)

    @property
    def members(self):
        return self.workers

    def name(self, number):
        return f"w{number}"


def make_question(num_tokens=3):
    return Question(np.arange(num_tokens, dtype=np.int32), "2+2=", "4", {})


def make_completion(
    version,
    *,
    num_tokens=4,
    finish_reason="stop",
    spans=None,
    logprob=-0.5,
    is_constrained=False,
):
    return Turn(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.full(num_tokens, logprob, dtype=np.float32),
        weights_versions=spans or (VersionSpan(version, 0, num_tokens),),
        finish_reason=finish_reason,
        text="four",
        is_constrained=is_constrained,
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
        overlong_penalty=overlong_penalty,
        kl_penalty=kl_penalty,
    )
