"""Holding outputs back loses, doubles and reorders nothing, and names the weights as they were.

A scripted scheduler takes the place of vLLM's; test_updates_in_flight.py has the real one.
"""

import gc
import tracemalloc
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from async_grpo.rollout.scheduler import WholeOutputs

LAST = FinishReason.LENGTH


class Scripted:
    """What a step says is what `update_from_output` is called with."""

    def __init__(self):
        self.requests = {}
        self.running = []
        self.pause_state = PauseState.UNPAUSED

    def add(self, name, kind=RequestOutputKind.FINAL_ONLY, logprobs=0):
        self.requests[name] = SimpleNamespace(
            request_id=name,
            sampling_params=SamplingParams(output_kind=kind, logprobs=logprobs),
            num_output_tokens=0,
        )

    def has_requests(self):
        return False

    def update_from_output(self, scheduler_output, outputs):
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        by_client = defaultdict(list)
        for output in outputs:
            by_client[client_of(output.request_id)].append(output)
        return {client: EngineCoreOutputs(outputs=said) for client, said in by_client.items()}

    def finish_requests(self, names, status):
        return [self.requests.pop(name) for name in names if name in self.requests]


class Scheduler(WholeOutputs, Scripted):
    pass


def client_of(name):
    return int(name) % 2


def said(name, *tokens, finish_reason=None, **others):
    ids = np.array(tokens).reshape(-1, 1)
    logprobs = LogprobsLists(ids, -ids / 8, ids[:, 0])
    return EngineCoreOutput(name, list(tokens), logprobs, finish_reason=finish_reason, **others)


class Run:
    """A scheduler, what was sampled, and what was sent, each token with its weights' version."""

    def __init__(self):
        self.scheduler = Scheduler()
        self.version = 0
        self.num_tokens = 0
        self.sampled, self.sent = defaultdict(list), defaultdict(list)
        self.finished, self.aborted = set(), set()

    def step(self, outputs=()):
        messages = self.scheduler.update_from_output(None, list(outputs))
        for client, message in messages.items():
            assert message.outputs
            for output in message.outputs:
                assert client == client_of(output.request_id)
                self.take(output)

    def take(self, output):
        name, tokens = output.request_id, output.new_token_ids
        assert name not in self.finished | self.aborted
        self.sent[name] += [(token, self.version) for token in tokens]
        if tokens:
            ids, logprobs, ranks, _ = output.new_logprobs
            assert ids[:, 0].tolist() == ranks.tolist() == tokens
            assert (logprobs[:, 0] * -8).tolist() == tokens
        if output.finished:
            self.finished.add(name)

    def sample(self, name, num_tokens, **others):
        tokens = range(self.num_tokens, self.num_tokens + num_tokens)
        self.num_tokens += num_tokens
        self.sampled[name] += [(token, self.version) for token in tokens]
        return said(name, *tokens, **others)

    def update(self):
        """As the engine's process does: steps while there is work, then other weights."""
        self.scheduler.pause_state = PauseState.PAUSED_ALL
        num_steps = 0
        while self.scheduler.has_requests():
            self.step()
            num_steps += 1
            assert num_steps == 1
        assert all(self.sent[name] == self.sampled[name] for name in self.scheduler.requests)
        self.scheduler.pause_state = PauseState.UNPAUSED
        self.version += 1


STEPS = st.lists(
    st.one_of(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(1, 3), st.booleans()),
            unique_by=lambda each: each[0],
        ),
        st.just("update"),
        st.just("cut"),
        st.integers(0, 5).map(lambda number: ("abort", str(number))),
    ),
    max_size=30,
)


@given(STEPS)
def test_all_that_was_sampled_is_sent_once_in_order_under_its_version(history):
    run = Run()
    for number in range(6):
        run.scheduler.add(str(number))
    for event in history:
        if event == "update":
            run.update()
        elif event == "cut":
            run.scheduler(cuts=True)
            run.step()
            assert all(run.sent[name] == run.sampled[name] for name in run.scheduler.requests)
        elif isinstance(event, tuple):
            (gone,) = run.scheduler.finish_requests([event[1]], None) or [None]
            run.aborted |= {event[1]} if gone else set()
        else:
            run.step(
                run.sample(str(number), num, finish_reason=LAST if ends else None)
                for number, num, ends in event
                if str(number) in run.scheduler.requests
            )
    run.update()
    for name, tokens in run.sampled.items():
        if name in run.aborted:
            assert run.sent[name] == tokens[: len(run.sent[name])]
        else:
            assert run.sent[name] == tokens


def test_nothing_is_sent_before_the_end_unless_somebody_reads_it():
    run = Run()
    run.scheduler.add("0")
    run.scheduler.add("1", kind=RequestOutputKind.DELTA)
    for _ in range(3):
        run.step([run.sample("0", 1), run.sample("1", 1)])
    assert run.sent["0"] == []
    assert run.sent["1"] == run.sampled["1"]
    run.step([run.sample("0", 1, finish_reason=LAST)])
    assert run.sent["0"] == run.sampled["0"]


def test_the_scheduler_tells_of_tokens_that_it_has_not_sent():
    run = Run()
    for name in ("0", "1"):
        run.scheduler.add(name)
    run.scheduler.requests["0"].num_output_tokens = 3
    run.scheduler.requests["1"].num_output_tokens = 0
    run.scheduler.running = [run.scheduler.requests["0"]]
    run.step([run.sample("0", 3)])
    assert run.sent["0"] == []
    assert run.scheduler() == (3, {"0": 3, "1": 0}, ["0"])
    run.step([run.sample("0", 1, finish_reason=LAST)])
    assert run.scheduler()[0] == 4


def test_a_cut_is_sent_by_one_step_and_asked_for_by_nobody_else():
    run = Run()
    for name in ("0", "1", "2"):
        run.scheduler.add(name)
    run.step([run.sample("0", 2), run.sample("1", 1), run.sample("2", 3)])
    assert not run.scheduler.has_requests()
    run.scheduler(cuts=True)
    run.scheduler()  # another one asks for numbers alone
    assert run.scheduler.has_requests()
    run.step()
    assert run.sent == run.sampled and len(run.sent) == 3
    assert not run.scheduler.has_requests()
    run.step([run.sample("0", 1), run.sample("1", 1)])
    assert [len(run.sent[name]) for name in ("0", "1")] == [2, 1]
    run.step([run.sample("0", 1, finish_reason=LAST)])
    assert run.sent["0"] == run.sampled["0"] and len(run.sent["1"]) == 1


def test_what_was_held_of_an_aborted_sequence_is_sent_by_no_cut_and_no_pause():
    run = Run()
    for name in ("0", "1", "2"):
        run.scheduler.add(name)
    run.step([run.sample("0", 2), run.sample("1", 2), run.sample("2", 2)])
    run.scheduler.finish_requests(["0"], None)
    run.scheduler(cuts=True)
    run.step()
    run.step([run.sample("1", 2), run.sample("2", 2)])
    run.scheduler.finish_requests(["1"], None)
    run.update()
    assert {name: len(tokens) for name, tokens in run.sent.items()} == {"1": 2, "2": 4}


def test_a_cut_of_nothing_has_an_idle_engine_do_nothing():
    run = Run()
    run.scheduler.add("0")
    run.scheduler(cuts=True)
    assert not run.scheduler.has_requests()


def test_what_an_output_carries_beside_tokens_is_sent_at_once_with_what_came_before():
    run = Run()
    run.scheduler.add("0")
    run.step([run.sample("0", 2)])
    run.step([run.sample("0", 1, kv_transfer_params={"block": 1})])
    assert run.sent["0"] == run.sampled["0"]


def test_log_probabilities_of_tokens_that_were_not_sampled_are_not_held():
    run = Run()
    run.scheduler.add("0", logprobs=3)
    run.step([run.sample("0", 1)])
    assert run.sent["0"] == run.sampled["0"]


def test_a_held_token_costs_at_most_16_bytes():
    """As in a step of vLLM: a view of each sequence's row, whose arrays all of them share."""
    num_sequences, num_tokens = 32, 1000
    scheduler = Scheduler()
    for number in range(num_sequences):
        scheduler.add(str(number))

    def step(token):
        ids = np.full((num_sequences, 1), token, np.int32)
        logprobs = ids * np.float32(-0.5)
        outputs = []
        for number in range(num_sequences):
            row = slice(number, number + 1)
            lists = LogprobsLists(ids[row], logprobs[row], ids[row, 0])
            outputs.append(EngineCoreOutput(str(number), [token], lists))
        assert scheduler.update_from_output(None, outputs) == {}

    step(1)  # what a sequence costs whatever its length
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(num_tokens):
            step(1000 + number)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes <= 16 * num_sequences * num_tokens
    messages = scheduler.update_from_output(
        None, [said(str(number), 7, finish_reason=LAST) for number in range(num_sequences)]
    )
    whole = messages[0].outputs[0]
    tokens = [1, *range(1000, 1000 + num_tokens), 7]
    assert whole.new_token_ids == tokens
    assert whole.new_logprobs.logprobs[1:-1, 0].tolist() == [-0.5 * token for token in tokens[1:-1]]


def test_the_first_outputs_statistics_are_told_with_the_last():
    scheduler = Scheduler()
    scheduler.add("0")
    stats = SimpleNamespace(num_cached_tokens=16)
    assert scheduler.update_from_output(None, [said("0", 3, prefill_stats=stats)]) == {}
    messages = scheduler.update_from_output(None, [said("0", 4, finish_reason=LAST)])
    (output,) = messages[0].outputs
    assert output.prefill_stats is stats
    assert (output.finish_reason, output.new_token_ids) == (LAST, [3, 4])


def test_experts_that_come_with_each_token_wait_with_it():
    scheduler = Scheduler()
    scheduler.add("0")
    rows = np.arange(12, dtype=np.uint8).reshape(6, 1, 2)
    scheduler.update_from_output(None, [said("0", 1, routed_experts=rows[:4])])
    scheduler.update_from_output(None, [said("0", 2, routed_experts=rows[4:5])])
    last = said("0", 3, finish_reason=LAST, routed_experts=rows[5:])
    (whole,) = scheduler.update_from_output(None, [last])[0].outputs
    assert whole.new_token_ids == [1, 2, 3]
    assert np.array_equal(whole.routed_experts, rows)
