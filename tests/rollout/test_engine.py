"""A real vLLM engine against transformers, while its weights change and when they may not."""

import asyncio
import copy
import dataclasses
import json
import os
import re

import numpy as np
import psutil
import pytest
import torch
from engine_stack import (
    FIRST,
    LONG_PROMPT,
    MAX_NUM_SEQS,
    SECOND,
    TOLERANCE,
    make_request,
    until_all_have_tokens,
)
from tiny_models import load_model, make_model, samples_of, snapshot_of
from transformers import AutoTokenizer

from async_grpo.rollout.engine import EngineBrokenError
from async_grpo.types import VersionSpan, WeightsDelta, WeightsVersion
from async_grpo.util.errors import ConfigError, WeightSyncError, WorkerError
from async_grpo.weight_sync.buckets import owner_of
from async_grpo.weight_sync.delta import encode

pytestmark = pytest.mark.integration


def test_tokens_of_weights_that_nobody_published_are_refused(stack):
    if stack.run(stack.engine.pulse()).serves == "none":
        with pytest.raises(WorkerError, match="published"):
            stack.generate(max_tokens=2)


def test_logprobs_are_those_of_transformers_before_and_after_an_update(stack):
    for version in (FIRST, SECOND, FIRST):
        stack.serve(version)
        assert stack.run(stack.engine.pulse()).serves == str(version)
        # The same prompt each time: a prefix cache that outlived its weights would show.
        completions = stack.generate()
        assert len(completions) == 4
        for completion in completions:
            num_tokens = len(completion.token_ids)
            assert completion.weights_versions == (VersionSpan(version, 0, num_tokens),)
            assert stack.error_of(completion, version) <= TOLERANCE


def test_an_engine_never_sees_what_is_written_for_the_next_update(stack):
    stack.serve(FIRST)
    staging = stack.engine._staging
    before = os.stat(staging.path).st_ino
    size = staging._file.size_bytes
    staging._file.write(np.full(size // 2, 255, np.uint8), 0)  # NaN in half of the weights
    assert stack.error_of(stack.generate()[0], FIRST) <= TOLERANCE
    staging._file.write(np.full(size, 255, np.uint8), 0)
    stack.serve(SECOND)
    assert stack.error_of(stack.generate()[0], SECOND) <= TOLERANCE
    assert os.stat(staging.path).st_ino == before, "one file serves all updates"


def test_a_grammar_forces_the_tokens_and_one_that_cannot_be_is_refused(stack):
    stack.serve(FIRST)
    tokenizer = AutoTokenizer.from_pretrained(stack.folder)
    for completion in stack.generate(grammar=json.dumps({"regex": "[0-9]{3}=[0-9]"})):
        said = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert re.fullmatch("[0-9]{3}=[0-9].?", said)  # some end with the model's own token
        assert completion.finish_reason == "stop"
    with pytest.raises(ConfigError, match="must be one that vLLM can make a grammar of, got: "):
        stack.generate(grammar=json.dumps({"json": {"type": "banana"}}))
    stack.generate()


def damaged(snapshot):
    bucket = snapshot.buckets[1]
    data = bucket.data.copy()
    data[7] ^= 1
    buckets = (snapshot.buckets[0], dataclasses.replace(bucket, data=data), *snapshot.buckets[2:])
    return dataclasses.replace(snapshot, buckets=buckets), "checksum"


def truncated(snapshot):
    bucket = snapshot.buckets[1]
    bucket = dataclasses.replace(bucket, data=bucket.data[:-8].copy())
    buckets = (snapshot.buckets[0], bucket, *snapshot.buckets[2:])
    return dataclasses.replace(snapshot, buckets=buckets), "must hold 40000 bytes, got 39992"


def without_its_last_bucket(snapshot):
    first = snapshot.tensors[owner_of(snapshot.tensors, snapshot.buckets[-1].pieces[0][0])]
    complaint = f"missing or incomplete, the first is '{first.name}'"
    return dataclasses.replace(snapshot, buckets=snapshot.buckets[:-1]), complaint


def sent_twice(snapshot):
    buckets = (snapshot.buckets[0], *snapshot.buckets)
    return dataclasses.replace(snapshot, buckets=buckets), "twice"


def empty(snapshot):
    return dataclasses.replace(snapshot, buckets=()), "are missing"


BROKEN = [damaged, truncated, without_its_last_bucket, sent_twice, empty]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_snapshot_is_refused_and_the_old_weights_serve(stack, broken):
    stack.serve(FIRST)
    snapshot, complaint = broken(stack.snapshot(SECOND))
    with pytest.raises(WeightSyncError, match=complaint):
        stack.load(snapshot)
    (completion,) = stack.generate(num_samples=1)
    assert completion.weights_versions[0].version == FIRST
    assert stack.error_of(completion, FIRST) <= TOLERANCE
    stack.serve(SECOND)  # and the next good one is taken
    assert stack.error_of(stack.generate()[0], SECOND) <= TOLERANCE


def test_weights_of_another_model_are_refused_by_the_first_parameter_that_differs(stack, tmp_path):
    stack.serve(FIRST)
    other = load_model(make_model(tmp_path, tied=True, hidden_size=96))
    with pytest.raises(WeightSyncError, match=r"embed_tokens.weight.*\(128, 64\).*got \(128, 96\)"):
        stack.load(snapshot_of(other.named_parameters(), 1))
    renamed = ((f"transformer.{n}", p) for n, p in stack.models[SECOND].named_parameters())
    with pytest.raises(WeightSyncError, match=r"'transformer.model.embed_tokens.weight'"):
        stack.load(snapshot_of(renamed, 1))
    assert stack.error_of(stack.generate()[0], FIRST) <= TOLERANCE


def test_a_sender_that_dies_midway_leaves_the_old_weights_serving(stack):
    stack.serve(FIRST)
    snapshot = stack.snapshot(SECOND)

    async def fetch_one(bucket):
        if bucket is not snapshot.buckets[0]:
            raise WeightSyncError("a bucket of weights is lost")
        return bucket.data

    with pytest.raises(WeightSyncError, match="is lost"):
        stack.run(stack.engine.load(snapshot, fetch_one))
    assert stack.error_of(stack.generate()[0], FIRST) <= TOLERANCE
    stack.serve(SECOND)
    assert stack.error_of(stack.generate()[0], SECOND) <= TOLERANCE


def touched(stack, version, *, touches):
    """The model of which some parameters were trained, and a snapshot of those alone."""
    model, changed = load_model(stack.folder), stack.models[version].state_dict()
    trained = {name: changed[name] for name, _ in model.named_parameters() if touches in name}
    model.load_state_dict(model.state_dict() | trained)
    snapshot = snapshot_of(trained.items(), version.batches)
    samples = samples_of(trained.items(), seed=version.batches)
    return model, dataclasses.replace(snapshot, rest_of_folder=True, samples=samples)


@pytest.mark.parametrize("touches", ["q_proj", "mlp"])
def test_weights_of_which_a_part_is_sent_are_those_of_the_folder_elsewhere(stack, touches):
    stack.serve(SECOND)
    version = WeightsVersion(0, 3)
    stack.models[version], snapshot = touched(stack, version, touches=touches)
    stack.load(snapshot)
    for completion in stack.generate():
        assert stack.error_of(completion, version) <= TOLERANCE
    with pytest.raises(WeightSyncError, match="are missing"):
        stack.load(dataclasses.replace(snapshot, rest_of_folder=False))
    del stack.models[version]


def test_samples_tell_of_a_wrong_collection_whose_bytes_are_whole(stack):
    stack.serve(FIRST)
    _, snapshot = touched(stack, SECOND, touches="mlp")
    wrong = [(name, 2 * p) for name, p in stack.models[SECOND].named_parameters() if "mlp" in name]
    buckets = snapshot_of(wrong, 1).buckets  # of a trainer that doubles
    with pytest.raises(EngineBrokenError, match=r"samples of 6 tensors differ, 25 of 'model\.lay"):
        stack.load(dataclasses.replace(snapshot, buckets=buckets))
    stack.run(stack.engine._llm.collective_rpc("discard_weight_update"))
    stack.load(snapshot)


def test_an_adapter_is_refused_where_nobody_asked_for_their_service(stack):
    with pytest.raises(WeightSyncError, match="start the worker with --max-lora-rank"):
        stack.load(dataclasses.replace(stack.snapshot(SECOND), adapter="{}"))


def test_only_the_contracts_stop_ids_end_an_output_and_they_are_its_last_token(stack):
    stack.serve(FIRST)
    stop = (1, 9, 17)  # 5 is the eos of the folder's config, and is not among them
    completions = stack.generate(prompt=LONG_PROMPT[:8], num_samples=64, max_tokens=64, stop=stop)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert len(stopped) > 10
    for completion in stopped:
        assert completion.token_ids[-1] in stop
    for completion in completions:
        assert not np.isin(completion.token_ids[:-1], stop).any()
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 64 and completion.token_ids[-1] not in stop
    assert any(5 in completion.token_ids[:-1] for completion in completions)


def test_a_seed_decides_the_tokens_and_its_samples_differ(stack):
    stack.serve(FIRST)
    for seed in (5, 2**64 - 1):
        once, again = ([c.token_ids.tolist() for c in stack.generate(seed=seed)] for _ in range(2))
        assert once == again
        assert len({tuple(ids) for ids in once}) == 4


def test_a_request_longer_than_the_model_is_refused_with_both_lengths(stack):
    with pytest.raises(WorkerError, match=r"512 tokens, got 300 \+ 213"):
        stack.generate(max_tokens=213)
    assert len(stack.generate(num_samples=1, max_tokens=212, stop=())[0].token_ids) == 212


def test_aborted_requests_return_what_there_is(stack):
    stack.serve(FIRST)

    async def abort_midway():
        request = make_request(prompt=LONG_PROMPT[:8], max_tokens=500, stop=())
        running = asyncio.create_task(stack.engine.generate(request))
        await until_all_have_tokens(stack.engine, 20)
        await stack.engine.abort()
        return await running

    for completion in stack.run(abort_midway()):
        assert completion.finish_reason == "abort"
        assert 20 <= len(completion.token_ids) < 500
        assert stack.error_of(completion, FIRST, prompt=LONG_PROMPT[:8]) <= TOLERANCE


def test_pulses_tell_of_tokens_while_they_are_made_and_of_who_waits(stack):
    """There are more sequences than the engine runs."""
    stack.serve(FIRST)
    engine = stack.engine

    async def scenario():
        before = (await engine.pulse()).num_tokens
        options = {"prompt": LONG_PROMPT[:8], "num_samples": MAX_NUM_SEQS, "stop": ()}
        requests = [make_request(max_tokens=500, lease_id=lease, **options) for lease in (3, 5)]
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        pulses = []
        while not pulses or sum(pulse.num_tokens > before + 1 for pulse in pulses) < 3:
            pulses.append(await engine.pulse())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return before, pulses[-3:], await engine.pulse()

    before, pulses, after = stack.run(scenario())
    counts = [pulse.num_tokens - before for pulse in pulses]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    for pulse, made in zip(pulses, counts, strict=True):
        assert pulse.serves == str(FIRST)
        assert pulse.requests == {3: (made, False, None), 5: (0, True, None)}
    assert after.requests == {}


def test_who_is_cancelled_ends_its_sequences_in_the_engine_and_nobody_elses(stack):
    stack.serve(FIRST)
    engine = stack.engine

    async def scenario():
        options = {"prompt": LONG_PROMPT[:8], "stop": ()}
        given_up = make_request(max_tokens=500, lease_id=3, **options)
        running = asyncio.create_task(engine.generate(given_up))
        await until_all_have_tokens(engine, 5)
        other = asyncio.create_task(engine.generate(make_request(max_tokens=100, **options)))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        made, num_tokens, _ = await engine._llm.engine_core.call_utility_async("scheduler")
        await other
        idle = await engine.pulse()
        await asyncio.sleep(0.2)
        return len(num_tokens), made, idle, await engine.pulse()

    num_sequences, made, idle, later = stack.run(scenario())
    assert num_sequences <= 4  # of the other
    assert idle.num_tokens <= made + 4 * 100
    assert idle == later and idle.requests == {}


def test_weights_that_fail_while_they_are_loaded_break_the_engine(stack, monkeypatch):
    from async_grpo.rollout.engine import EngineBrokenError

    async def fail(**_options):
        raise RuntimeError("out of memory")

    stack.serve(FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(stack.engine._llm, "finish_weight_update", fail)
        with pytest.raises(EngineBrokenError, match=r"0\.1 failed.*out of memory"):
            stack.serve(SECOND)
    # Nothing was really loaded here: put the engine in order for the tests that follow.
    stack.run(stack.engine._llm.collective_rpc("discard_weight_update"))
    stack.run(stack.engine._llm.resume_generation())


def test_what_has_changed_alone_brings_the_new_weights(stack):
    third = WeightsVersion(0, 9)
    old = dataclasses.replace(stack.snapshot(FIRST), is_base=True)
    model = stack.models[third] = copy.deepcopy(stack.models[FIRST])
    with torch.no_grad():
        model.model.norm.weight.mul_(-2.0)
    new = snapshot_of(model.named_parameters(), third.batches)
    deltas = [
        encode(n.data, o.data, item_bytes=4) for n, o in zip(new.buckets, old.buckets, strict=True)
    ]
    buckets = tuple(
        dataclasses.replace(bucket, delta=WeightsDelta(delta, delta.nbytes))
        for bucket, delta in zip(new.buckets, deltas, strict=True)
    )
    stack.load(old)
    new = dataclasses.replace(new, buckets=buckets, delta_since=FIRST)
    loaded = stack.load(new)
    assert 0 < loaded.received_bytes < new.size_bytes / 100
    (completion,) = stack.generate(num_samples=1)
    assert stack.error_of(completion, third) <= TOLERANCE
    assert stack.error_of(completion, FIRST) > 100 * TOLERANCE
    stack.serve(FIRST)  # and whole ones are taken again
    assert stack.error_of(stack.generate(num_samples=1)[0], FIRST) <= TOLERANCE


def test_a_sleeping_engine_holds_no_memory_and_serves_new_weights_when_it_wakes(stack):
    """On a CPU its processes end, so that what was loaded is gone: only the folder's weights are.

    Requests that run end with the tokens so far.
    """
    stack.serve(FIRST)

    def processes():  # of other stacks of this process too; {id: bytes}
        children = psutil.Process().children(recursive=True)
        return {child.pid: child.memory_info().rss for child in children}

    async def scenario():
        running = asyncio.create_task(
            stack.engine.generate(make_request(max_tokens=500, prompt=LONG_PROMPT[:8], stop=()))
        )
        await until_all_have_tokens(stack.engine, 1)
        await stack.engine.sleep()
        cut = await running
        return cut, processes(), stack.engine.is_dead, await stack.engine.wake()

    awake = processes()
    cut, asleep, is_dead, kept = stack.run(scenario())
    assert {completion.finish_reason for completion in cut} == {"abort"}
    freed = [awake[pid] - asleep.get(pid, 0) for pid in awake]
    assert max(freed) > 100 << 20  # a busy machine may have taken most of an idle engine's before
    assert not is_dead and not kept
    stack.serve(SECOND)
    for completion in stack.generate():
        assert stack.error_of(completion, SECOND) <= TOLERANCE
