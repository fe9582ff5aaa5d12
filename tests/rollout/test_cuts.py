"""A real engine tells, while it samples, what all outputs have; another goes on from there."""

import asyncio
import dataclasses
import time

import numpy as np
import pytest
from engine_stack import FIRST, LONG_PROMPT, SECOND, STOP, TOLERANCE, fetch, make_request

from async_grpo.batching.leased_work import covers
from async_grpo.types import Cut, Turn
from async_grpo.types.samples import joined
from async_grpo.util.errors import WorkerError

pytestmark = pytest.mark.integration
PROMPT = LONG_PROMPT[:40]
LEASE = 5
MAX_TOKENS = 160
NOTHING = Turn(np.zeros(0, np.int32), np.zeros(0, np.float32), (), "unfinished", "")


async def told(engine, request, *, update=None):
    """The cuts of a request while it runs, with new weights between two of them, and its answer."""
    answering = asyncio.create_task(engine.generate(request))
    cuts = []
    while not answering.done():
        pulse = await engine.pulse(lambda ids: f"{len(ids)} tokens")
        if (own := (pulse.requests or {}).get(LEASE)) and own.cut:
            cuts.append(own.cut)
            if update and len(cuts) == 2:
                await update()
    return cuts, await answering


def so_far(cuts):
    return [joined(parts) for parts in zip(*(cut.parts for cut in cuts), strict=True)]


def check_prefix(turn, whole):
    length = len(turn.token_ids)
    assert turn.token_ids.tolist() == whole.token_ids[:length].tolist()
    assert turn.logprobs.tolist() == whole.logprobs[:length].tolist()
    for part in (turn, whole):
        assert [span.stop for span in part.weights_versions][-1:] == [len(part.token_ids)] or (
            not len(part.token_ids)
        )
    assert versions(turn) == versions(whole)[:length]
    if turn.is_finished:
        assert turn.text == f"{length} tokens"
        assert (turn.finish_reason, length) == (whole.finish_reason, len(whole.token_ids))


def versions(turn):
    return [span.version for span in turn.weights_versions for _ in range(span.start, span.stop)]


def test_cuts_tell_every_token_once_with_its_version_up_to_one_step_of_the_engine(stack):
    stack.serve(FIRST)
    request = make_request(
        prompt=PROMPT, num_samples=6, max_tokens=MAX_TOKENS, lease_id=LEASE, with_cuts=True
    )
    # As all requests of a run ask, of whose model it is not known that it has no experts.
    contract = dataclasses.replace(request.sampling, with_experts=True)
    request = dataclasses.replace(request, sampling=contract)
    snapshot = stack.snapshot(SECOND)

    async def update():
        await stack.engine.load(snapshot, fetch)

    cuts, answer = stack.run(told(stack.engine, request, update=update))
    assert [cut.number for cut in cuts] == list(range(len(cuts)))
    assert len(cuts) >= 4
    for part in (part for cut in cuts for part in cut.parts):
        assert covers(part.weights_versions, np.ones(len(part.token_ids), np.bool_))
        assert all(span.start < span.stop for span in part.weights_versions)
    for number in range(1, len(cuts) + 1):
        turns = so_far(cuts[:number])
        for turn, whole in zip(turns, answer, strict=True):
            check_prefix(turn, whole)
        # Each began a few steps of the engine after the first; since then all have had every step.
        steps = {
            len(turn.token_ids) - len(first.token_ids)
            for turn, first in zip(turns, so_far(cuts[:1]), strict=True)
            if not turn.is_finished
        }
        assert len(steps) <= 1
    assert {FIRST, SECOND} == {version for turn in answer for version in versions(turn)}


def test_another_worker_goes_on_from_a_cut_as_if_it_had_sampled_all(stack):
    stack.serve(FIRST)
    request = make_request(
        prompt=PROMPT, num_samples=6, max_tokens=MAX_TOKENS, lease_id=LEASE, with_cuts=True
    )
    cuts, _ = stack.run(told(stack.engine, request))
    begun = so_far(cuts[: len(cuts) // 2])
    # One that had ended, whatever the random numbers were.
    ended = f"{len(begun[3].token_ids)} tokens"
    begun[3] = dataclasses.replace(begun[3], finish_reason="stop", text=ended)
    request = dataclasses.replace(request, begun=tuple(begun))
    further, answer = stack.run(told(stack.engine, request))
    assert further
    for turn, parts, whole in zip(begun, so_far(further), answer, strict=True):
        check_prefix(turn, whole)
        check_prefix(joined([turn, parts]), whole)
        assert whole.finish_reason in ("stop", "length")
        assert len(whole.token_ids) <= MAX_TOKENS
        assert (whole.finish_reason == "stop") >= (whole.token_ids[-1] == STOP)
        assert stack.error_of(whole, FIRST, prompt=PROMPT) < TOLERANCE
    assert answer[3].token_ids.tolist() == begun[3].token_ids.tolist()
    assert np.mean([len(turn.token_ids) for turn in answer]) > np.mean(
        [len(turn.token_ids) for turn in begun]
    )


def test_cuts_are_told_of_those_requests_alone_that_ask_for_them(stack):
    """All else is sent when it ends, whoever looks meanwhile."""
    stack.serve(FIRST)
    plain = make_request(prompt=PROMPT, num_samples=6, max_tokens=MAX_TOKENS, lease_id=LEASE)
    # A cut that was asked for as the request before ended stays asked for: this one takes it.
    stack.generate(prompt=PROMPT, num_samples=1, max_tokens=2)

    async def looked_at():
        answering = asyncio.create_task(stack.engine.generate(plain))
        seen, cuts = [], []
        while not answering.done():
            pulse = await stack.engine.pulse()
            cuts += [each.cut for each in pulse.requests.values() if each.cut]
            states = stack.engine._llm.output_processor.request_states.values()
            seen += [state.detokenizer.num_output_tokens() for state in states]
        return seen, cuts, await answering

    seen, cuts, answer = stack.run(looked_at())
    assert len(seen) > 6 and not any(seen) and not cuts
    assert len(answer) == 6


def test_an_output_goes_on_with_random_numbers_of_its_own_that_no_other_has_used():
    from async_grpo.rollout.vllm_requests import MAX_SEED, sampling_params

    num_samples = 4
    plain = make_request(num_samples=num_samples, max_tokens=MAX_TOKENS, seed=1000)
    whole = sampling_params(plain)
    assert (whole.n, whole.max_tokens, whole.seed) == (num_samples, MAX_TOKENS, 1000)
    seeds = []
    for length in range(6):
        begun = dataclasses.replace(NOTHING, token_ids=np.zeros(length, np.int32))
        request = dataclasses.replace(plain, begun=(begun,) * num_samples)
        for index in range(num_samples):
            own = sampling_params(request, index)
            assert (own.n, own.max_tokens) == (1, MAX_TOKENS - length)
            seeds.append(own.seed)
    # vLLM gives output i of a group the seed + i: who has no token yet samples what it would have.
    assert seeds[:num_samples] == [1000, 1001, 1002, 1003]
    assert len(set(seeds)) == len(seeds)
    for seed in (MAX_SEED - 5, MAX_SEED - 1, MAX_SEED, 2 * MAX_SEED):
        for whose in (
            dataclasses.replace(plain, seed=seed),
            dataclasses.replace(request, seed=seed),
        ):
            index = num_samples - 1 if whose.begun else None
            found = sampling_params(whose, index).seed
            assert found in range(MAX_SEED - num_samples)
    assert sampling_params(dataclasses.replace(request, seed=None), 1).seed is None


@pytest.mark.parametrize("begun", [(), (NOTHING,) * 4])
def test_what_the_engine_does_not_have_yet_has_no_cut(begun):
    from async_grpo.rollout.in_flight import InFlight

    request = dataclasses.replace(make_request(num_samples=4), begun=begun)
    assert not InFlight(request, 0).has_come({}, {})


class Asked:
    """A request, of which a cut comes or does not, and can be read or not."""

    def __init__(self, lease_id, *, comes=True, cut=None):
        self.request = make_request(lease_id=lease_id)
        self.comes, self.found = comes, cut

    def has_come(self, sequences, num_tokens):
        return self.comes

    def cut(self, sequences, num_tokens, decode):
        if self.found is None:
            raise WorkerError("log-probabilities must be finite")
        return self.found


def test_what_does_not_come_delays_a_pulse_once_and_what_cannot_be_read_costs_no_other():
    from async_grpo.rollout import in_flight

    late = [Asked(lease_id, comes=False) for lease_id in range(100)]
    come = [Asked(100), Asked(101, cut=Cut(0, ()))]
    started = time.monotonic()
    cuts = asyncio.run(in_flight.cuts_of({each: {} for each in come}, {}, str))
    assert cuts == {101: come[-1].found}
    assert time.monotonic() - started < in_flight.LOOK_INTERVAL_S  # it does not wait for nothing
    asked = [*late, *come]
    started = time.monotonic()
    cuts = asyncio.run(in_flight.cuts_of({each: {} for each in asked}, {}, str))
    limit_s = in_flight.NUM_LOOKS * in_flight.LOOK_INTERVAL_S
    assert limit_s <= time.monotonic() - started < 10 * limit_s
    assert cuts == {101: asked[-1].found}
