"""Whoever episodes ask: an engine that is the model of the gradient's oracle, or a script."""

import numpy as np
import torch
from oracle import make_sample, oracle_logprobs

from async_grpo.config.roles import ENVIRONMENT, GENERATION
from async_grpo.environments.play import GroupPlay
from async_grpo.types import (
    EpisodesRequest,
    Question,
    RunId,
    SamplingContract,
    Turn,
    VersionSpan,
    WeightsVersion,
)
from async_grpo.util.errors import DeadlineError
from async_grpo.util.user_code import UserCode

VERSION = WeightsVersion(1, 0)


def make_request(question=None, **fields):
    given = {
        "ordinal": 7,
        "attempt": 0,
        "question": question or Question(np.array([5, 6], np.int32), "?", "20", {}),
        "num_samples": 4,
        "sampling": SamplingContract(1.0, (1,), 6),
        "oldest": VERSION,
        "environment": UserCode("mine.py:Mine", ""),
        "max_row_tokens": 64,
        "idle_timeout_s": 30.0,
        "run": RunId(1, 1),
        "model": "",
        "renderer": "auto",
    }
    return EpisodesRequest(**(given | fields))


async def play(environment, ask, request=None, renderer=None):
    group = GroupPlay(request or make_request(), ask, lambda model, name: renderer)
    return await group.run(environment)


class Scripted:
    """Answers turns by a script: token lists, whole turns, or errors to be raised."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.asked = []  # (history, sampling, preferred worker)

    async def __call__(self, role, method, request, *, prefer=None, **_):
        if role == ENVIRONMENT:  # nobody may wait here for a server that is away
            raise DeadlineError(request.why)
        assert (role, method) == (GENERATION, "generate")
        self.asked.append((request.input_token_ids.tolist(), request.sampling, prefer))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Turn):
            return [answer]
        return [make_turn(answer, worker_id=f"w{len(self.asked)}")]


class OracleEngine:
    """Samples with the oracle's numbers: `model` may move between two groups."""

    def __init__(self, model, seed=0):
        self.model = model
        self._rng = np.random.default_rng(seed)

    async def __call__(self, role, method, request, **_):
        longest = request.sampling.max_tokens
        output = self._rng.integers(64, size=self._rng.integers(1, longest + 1))
        plain = make_sample(request.input_token_ids, output)
        with torch.no_grad():
            own = oracle_logprobs(self.model, plain, temperature=request.sampling.temperature)
        return [make_turn(output, logprobs=own.numpy())]


def make_turn(
    token_ids, *, logprobs=None, worker_id="", finish_reason="stop", cut=None, version=VERSION
):
    length = len(token_ids)
    spans = (VersionSpan(version, 0, length),)
    if cut:
        newer = version._replace(batches=version.batches + 1)
        spans = (VersionSpan(version, 0, cut), VersionSpan(newer, cut, length))
    return Turn(
        np.array(token_ids, np.int32),
        np.array(-np.ones(length) if logprobs is None else logprobs, np.float32),
        spans,
        finish_reason,
        "",
        worker_id,
    )
