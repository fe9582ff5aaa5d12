"""Scores outputs under the reference model or a teacher, many requests to one packed forward.

consumes:     groups of outputs, each with the weights version that must score it; None: a teacher's
produces:     one log-probability for each output token, at the sampling temperature; on request a
              teacher's payload for each output: its distribution at every token
waits for:    the model to be idle; the outputs that have arrived by then share a forward, each of
              the worker's ranks (`scorer_ranks.py`) its part of them
unblocked by: the end of a forward, or a new request while the model is idle
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from async_grpo.config.roles import REFERENCE, role_of
from async_grpo.types import (
    Arrays,
    HeadRequest,
    LogprobRequest,
    Payload,
    Pulse,
    RequestPulse,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util import deadlines
from async_grpo.util.add_ons import add_on
from async_grpo.util.errors import StaleAnswerError, WeightSyncError, WorkerError
from async_grpo.util.imports import without_collection

Scores = NDArray[np.float32]  # [L]
Answer = tuple[Scores, Arrays]
OWN_WEIGHTS = WeightsVersion(0, 0)  # a teacher's, which never change


class _Wanted(NamedTuple):
    """What outputs that share a forward have in common."""

    version: WeightsVersion  # exactly these weights
    temperature: float
    payload: Payload | None
    width: int  # the first columns of the vocabulary, which the student has too


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    """One queued output, and the future of its answer."""

    prompt: NDArray[np.int32]  # [P]
    token_ids: NDArray[np.int32]  # [L]
    wanted: _Wanted
    scores: asyncio.Future[Answer]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    def answer(self, result: Answer | Exception) -> None:
        """Deliver the result, unless the caller is gone."""
        if self.scores.done():
            return
        if isinstance(result, Exception):
            self.scores.set_exception(result)
        else:
            self.scores.set_result(result)


class LogprobWorker:
    """Wrap with `ray.remote(max_concurrency=1000)`; each request runs as another coroutine."""

    def __init__(
        self,
        model_path: str,
        *,
        worker_id: str,
        max_tokens: int,
        role: str = REFERENCE,
        dtype: str = "auto",
        temperature: float | None = None,
        num_ranks: int = 1,
        on_device: bool = False,
        memory_share: float = 0.0,
        lease_s: float = deadlines.LEASE_S,
    ) -> None:
        """`on_device`: Ray has given each rank one; `memory_share`: of its memory, 0: all."""
        # Not at the top: dispatchers import this file, and these imports take seconds.
        began = time.monotonic()
        with without_collection():
            from async_grpo.devices.current import device_ids
            from async_grpo.model.model_folder import hash_model
            from async_grpo.rollout.scorer_ranks import RankOptions, ScorerRanks

        imported = time.monotonic()
        options = RankOptions(worker_id, model_path, dtype, num_ranks, on_device, memory_share)
        self._ranks = ScorerRanks(options)
        self._scorer = self._ranks.scorer
        ready = time.monotonic()
        startup = [("importing", imported - began), ("loading the model", ready - imported)]
        self._version = None if role_of(role).loads_weights else OWN_WEIGHTS
        model_hash = ""
        if self._version is not None:
            model_hash = hash_model(model_path)
            startup.append(("hashing the model", time.monotonic() - ready))
        facts, weight = self._scorer.facts, self._scorer.head.weight
        self._info = WorkerInfo(
            worker_id=worker_id,
            role=role,
            node_id="",
            pid=os.getpid(),
            model_path=model_path,
            vocab_size=facts.vocab_size,
            tokenizer_hash=facts.tokenizer_hash,
            capacity=float(num_ranks * max_tokens),
            max_model_len=min(max_tokens, facts.max_positions),
            temperature=temperature,
            model_hash=model_hash,
            hidden_size=weight.shape[1],
            num_ranks=num_ranks,
            item_size=weight.element_size(),
            dtype=str(weight.dtype).removeprefix("torch."),
            devices=device_ids(num_ranks) if on_device else (),
            lease_s=lease_s,
            startup=tuple(startup),
        )
        self._max_tokens = max_tokens
        self._line: list[_Output] = []  # in order of arrival
        self._unanswered: set[int] = set()  # leases of requests
        self._num_tokens = 0  # scored so far
        self._model = asyncio.Lock()  # one forward or one change of weights at a time
        self._serving: asyncio.Task[None] | None = None

    async def info(self) -> WorkerInfo:
        """Who this worker is; answers once its model is loaded."""
        return replace(self._info, node_id=ray.get_runtime_context().get_node_id())

    async def ping(self, after_s: float = 0.0) -> Pulse:
        """Answer after `after_s` with the served version and the waiting requests."""
        await asyncio.sleep(after_s)
        # All scores of a request are made at once: until then it is queued.
        requests = {lease_id: RequestPulse(0, is_waiting=True) for lease_id in self._unanswered}
        return Pulse(str(self._version or "none"), self._num_tokens, requests)

    async def logprobs(self, request: LogprobRequest) -> tuple[Scores, ...]:
        """Log-probabilities of every output's tokens, [L] float32 each.

        Raises:
            WorkerError: another temperature than this worker serves, or outputs beyond its budget.
            StaleAnswerError: the request's weights are not the ones served.
        """
        return tuple(scores for scores, _ in await self._answers(request))

    async def teach(self, request: LogprobRequest) -> tuple[object, ...]:
        """The answer of `logprobs`, then the payload of each output; raises the same.

        The caller sets `num_returns` to the number of outputs + 1, so that each payload is another
        object in the store, which it need not fetch.
        """
        answers = await self._answers(request)
        return tuple(scores for scores, _ in answers), *(arrays for _, arrays in answers)

    async def head(self, request: HeadRequest) -> tuple[None, Arrays]:
        """The second return value: the head that makes logits of this teacher's hidden states."""
        from async_grpo.rollout.scorer_ranks import head

        arguments = [()] * self._ranks.num_ranks
        return None, (await asyncio.to_thread(self._ranks.run, head, arguments))[0]

    async def join_express(self, meeting: object, first: int) -> None:
        """Return when the group has met, in which this worker's ranks are members `first` on.

        Raises `ExpressLost`.
        """
        from async_grpo.rollout.scorer_ranks import join_express

        numbers = range(first, first + self._ranks.num_ranks)
        arguments = [(self._max_tokens, meeting, number) for number in numbers]
        await asyncio.to_thread(self._ranks.run, join_express, arguments)

    async def serve_express(self, *work: Any) -> None:
        """Return when all members have the logits of a round; raises `ExpressLost`.

        `work`: of each rank. Requests with a lease are served meanwhile, by a worker of one rank.
        """
        from async_grpo.rollout.scorer_ranks import serve_express

        forwards = add_on("express.teacher").num_forwards
        most = max(forwards(each, max_tokens=self._max_tokens) for each in work)
        arguments = [(self._max_tokens, each, most) for each in work]
        await asyncio.to_thread(self._ranks.run, serve_express, arguments)
        self._num_tokens += sum(each.num_tokens for each in work)

    async def _answers(self, request: LogprobRequest) -> list[Answer]:
        outputs = self._outputs(request)
        self._line += outputs
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="logprob-forwards")
        self._unanswered.add(request.lease_id)
        try:
            return list(await asyncio.gather(*(output.scores for output in outputs)))
        finally:
            self._unanswered.discard(request.lease_id)

    async def load_weights(self, snapshot: WeightsSnapshot) -> WeightsAck:
        """Serve a snapshot after the running forward; one that is not newer changes nothing.

        Raises:
            WeightSyncError: refused or incomplete; the old weights serve on.
        """
        from async_grpo.rollout.scorer_ranks import load
        from async_grpo.rollout.weights_update import StagedWeights, fetch_bytes, fetch_into
        from async_grpo.weight_sync.buckets import check_whole

        if not role_of(self._info.role).loads_weights:
            raise WeightSyncError(
                f"a {self._info.role} worker keeps the weights that it was started with, got "
                f"{snapshot.version}: publish to the roles that follow the policy alone"
            )
        if snapshot.adapter:
            raise WeightSyncError(
                f"a {self._info.role} worker takes weights of the model, got those of an adapter: "
                "publish them merged"
            )
        started_at = time.monotonic()
        is_alias = self._version is not None and snapshot.equals(self._version)
        staged = StagedWeights()  # in memory that all ranks map
        try:
            if not is_alias:
                check_whole(snapshot.tensors, snapshot.buckets)
                await fetch_into(staged, staged.begin(snapshot), fetch_bytes)
            async with self._model:
                if self._version is None or snapshot.version > self._version:
                    if not is_alias:
                        own = (staged.path, snapshot.tensors, snapshot.rest_of_folder)
                        arguments = [own] * self._ranks.num_ranks
                        await asyncio.to_thread(self._ranks.run, load, arguments)
                    self._version = snapshot.version
                seconds = time.monotonic() - started_at
                return WeightsAck(self._info.worker_id, self._version, seconds, 0.0)
        finally:
            staged.drop()

    async def abort_all(self) -> None:
        """Drop waiting requests, when the caller is gone."""
        for output in self._line:
            output.answer(WorkerError("the request was aborted"))
        self._line.clear()

    async def _serve(self) -> None:
        """Run forward passes until the queue is empty; a request starts this unless it runs."""
        async with self._model:
            room = self._ranks.num_ranks * self._max_tokens
            while taken := take_forward(self._line, max_tokens=room):
                shares = self._shares([each for each in taken if not each.scores.done()])
                outputs = [output for share in shares for output in share]
                if not outputs:  # their callers are gone
                    continue
                results: Sequence[Answer | Exception]
                try:
                    results = await asyncio.to_thread(self._score, shares)
                    self._num_tokens += sum(output.num_tokens for output in outputs)
                except StaleAnswerError as error:
                    results = [error] * len(outputs)
                except Exception as error:  # the model may raise any: each caller gets it
                    results = [WorkerError(f"{type(error).__name__}: {error}")] * len(outputs)
                for output, result in zip(outputs, results, strict=True):
                    output.answer(result)

    def _shares(self, outputs: Sequence[_Output]) -> list[list[_Output]]:
        """The outputs of each rank; what has no room goes first next time."""
        from async_grpo.rollout.scorer_ranks import deal

        sizes = [output.num_tokens for output in outputs]
        dealt = deal(sizes, self._ranks.num_ranks, max_tokens=self._max_tokens)
        *shares, left = ([outputs[index] for index in part] for part in dealt)
        self._line[:0] = left
        return shares

    def _score(self, shares: Sequence[Sequence[_Output]]) -> list[Answer]:
        """One forward of each rank, and the answers of one share after the other.

        Compares the versions here, since weights may change while outputs wait.
        """
        from async_grpo.rollout.scorer_ranks import score

        wanted = next(share[0].wanted for share in shares if share)
        if wanted.version != self._version:
            raise StaleAnswerError(
                f"{self._info.role} weights {wanted.version} were asked, {self._version} are served"
            )
        setting = wanted.temperature, wanted.width, wanted.payload
        arguments = [([(o.prompt, o.token_ids) for o in share], *setting) for share in shares]
        return [answer for part in self._ranks.run(score, arguments) for answer in part]

    def _outputs(self, request: LogprobRequest) -> list[_Output]:
        """The outputs of a request; raises `WorkerError` if this worker cannot serve it."""
        me = self._info
        if me.temperature is not None and request.temperature != me.temperature:
            raise WorkerError(
                f"worker {me.worker_id} serves the temperature {me.temperature} only, got "
                f"{request.temperature}: give worker and trainer the same --temperature"
            )
        rows = list(zip(request.prompt_token_ids, request.output_token_ids, strict=True))
        longest = max((len(prompt) + len(output) for prompt, output in rows), default=0)
        if longest > self._max_tokens:
            raise WorkerError(
                f"a prompt and its output must fit the {self._max_tokens} tokens of worker "
                f"{me.worker_id}, got {longest}: start it with a larger --max-tokens-per-gpu"
            )
        own = self._scorer.facts.vocab_size
        vocab_size = min(own, request.vocab_size or own)
        largest = max((int(ids.max(initial=0)) for row in rows for ids in row), default=0)
        if largest >= vocab_size:
            raise WorkerError(
                f"every token must be below {vocab_size}, which {me.model_path} and the student "
                f"both have, got {largest}: a model whose vocabulary is padded sampled the padding"
            )
        version = OWN_WEIGHTS if request.version is None else request.version
        wanted = _Wanted(version, request.temperature, request.payload, vocab_size)
        new_future = asyncio.get_running_loop().create_future
        return [_Output(prompt, token_ids, wanted, new_future()) for prompt, token_ids in rows]


def take_forward(line: list[_Output], *, max_tokens: int) -> list[_Output]:
    """The outputs of the next packed forward, removed from `line`; each fits by itself.

    The outputs with the oldest weights go first, then the first that arrived; later ones that want
    the same of the same weights fill the room that is left.

    >>> from types import SimpleNamespace
    >>> wanted = SimpleNamespace(version=WeightsVersion(0, 0))
    >>> line = [SimpleNamespace(num_tokens=n, wanted=wanted) for n in (60, 50, 40)]
    >>> [[output.num_tokens for output in take_forward(line, max_tokens=100)] for _ in range(3)]
    [[60, 40], [50], []]
    """
    first = min(line, key=lambda output: output.wanted.version, default=None)
    room, taken, left = max_tokens, [], []
    for output in line:
        if first and output.wanted == first.wanted and output.num_tokens <= room:
            taken.append(output)
            room -= output.num_tokens
        else:
            left.append(output)
    line[:] = left
    return taken
