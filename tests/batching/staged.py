"""A pipeline between scripted services, and what came of one slot."""

import asyncio

import numpy as np
import pytest
from scripted import Registry, make_completion, make_question, make_verdict, run
from scripted_run import make_config, make_plan

from async_grpo.batching.admission import StepKey
from async_grpo.batching.failures import SlotFailed
from async_grpo.batching.ledger import Ledger, SlotAccount
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.config import roles
from async_grpo.types import GenerationRequest, SamplingContract, WeightsVersion

OLDEST, NEWER = WeightsVersion(7, 3), WeightsVersion(7, 4)
REFERENCE = WeightsVersion(7, 0)
STEP = StepKey(0, 0)
QUESTION = make_question(num_tokens=3)
REQUEST = GenerationRequest(
    5, 0, QUESTION.input_token_ids, num_samples=2, sampling=SamplingContract(0.7, (1,), 8)
)
TIMEOUT_S = 100.0


class Worker:
    """Answers one request after the other with what the script says: a value or an error."""

    def __init__(self, *answers, seconds=1.0):
        self.answers, self.requests, self.seconds = list(answers), [], seconds

    async def generate(self, request, lease_id=None):
        self.requests.append(request)
        await asyncio.sleep(self.seconds)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    verify = logprobs = generate


def group(version=OLDEST, num_samples=2):
    return tuple(make_completion(version, num_tokens=4 + i) for i in range(num_samples))


SCORED = (make_verdict(1.0), make_verdict(0.0))
SCORES = (np.full(4, -1.0, np.float32), np.full(5, -2.0, np.float32))


def make_books(request):
    """Of a ledger with the slot of this request."""
    ledger = Ledger()
    ledger.admit(request.ordinal, num_samples=request.num_samples, step=StepKey(0, 0))
    return SlotAccount(ledger, request.ordinal)


class Stage:
    """A pipeline between scripted services, and what came of one slot."""

    def __init__(
        self,
        generation=None,
        verdicts=None,
        reference=None,
        workers=None,
        generation_timeout_s=0.0,
        **objective,
    ):
        workers = workers or [Worker(group()) if generation is None else generation]
        self.generation = Registry(*workers)
        self.verifiers = Registry(verdicts or Worker(SCORED), role=roles.VERIFIER)
        self.reference = Registry(reference, role=roles.REFERENCE)
        registries = {
            roles.GENERATION: self.generation,
            roles.VERIFIER: self.verifiers,
            roles.REFERENCE: self.reference,
        }
        if reference and not objective:
            objective = {"kl_coefficient": 0.1}
        config = make_config(
            max_generation_tokens=8,
            stall_timeout_s=TIMEOUT_S,
            generation_timeout_s=generation_timeout_s,
            **objective,
        )
        self.books = make_books(REQUEST)
        plan = make_plan(config, sampling=REQUEST.sampling, incarnation=OLDEST.incarnation)
        self.pipeline = SlotPipeline(plan, registries.__getitem__)

    def run(self):
        """The group; afterwards no sample may be left in a stage and no lease may be open."""
        try:
            return run(
                self.pipeline.run(QUESTION, REQUEST, STEP, oldest=OLDEST, account=self.books)
            )
        finally:
            assert set(self.pipeline.stages.counts.values()) <= {0}
            assert not self.generation.open and not self.verifiers.open and not self.reference.open

    def failure(self):
        with pytest.raises(SlotFailed) as caught:
            self.run()
        return caught.value.stage, str(caught.value)
