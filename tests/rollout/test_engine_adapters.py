"""A real vLLM engine that serves adapters against peft, while newer ones come."""

import asyncio
import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_snapshots import adapter_config, adapter_snapshot, adapter_tensors, make_adapter
from conftest import open_stack
from engine_stack import (
    CANARY_TOKENS,
    FIRST,
    LONG_PROMPT,
    MAX_NUM_SEQS,
    SECOND,
    fetch,
    make_request,
    num_sampled,
    until_all_have_tokens,
)

from async_grpo.types import VersionSpan, WeightsVersion
from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync.sync_report import canary_complaint

pytestmark = pytest.mark.integration
CLOSE = 2e-5  # nats; rounding was seen to reach 5.6e-6 at one of 150 tokens
LEARNING_RATE = 1e-4
NUM_SEEDS = 15  # with seven kinds of sabotage 105 cases


@pytest.fixture(scope="module")
def adapted(model_folder):
    """Two adapters at a time: more than the versions that most tests have in flight."""
    with open_stack(model_folder, max_lora_rank=6, max_loras=2) as stack:
        for batches in range(1, 10):
            version = WeightsVersion(0, batches)
            stack.models[version] = make_adapter(model_folder, seed=batches)
        yield stack


def publish(stack, batches, **options):
    snapshot = adapter_snapshot(
        stack.models[WeightsVersion(0, batches)], batches, rows=CANARY_TOKENS, **options
    )
    return snapshot, stack.load(snapshot)


def check(stack, completion, version, **options):
    assert completion.weights_versions == (VersionSpan(version, 0, len(completion.token_ids)),)
    assert stack.error_of(completion, version, **options) <= CLOSE


def test_requests_of_the_base_have_no_adapter_though_all_places_are_taken(adapted):
    """vLLM on a CPU would give them that of the last place."""
    adapted.run(adapted.engine.rename(FIRST))

    async def scenario():
        running = [await start(adapted, max_tokens=200)]
        for batches in (1, 2):
            await load(adapted, batches)
            running.append(await start(adapted))
        return await asyncio.gather(*running)

    for batches, completions in enumerate(adapted.run(scenario())):
        for completion in completions:
            check(adapted, completion, WeightsVersion(0, batches))


def test_each_version_is_pefts_own_and_nothing_pauses(adapted):
    for batches in range(1, 5):
        version = WeightsVersion(0, batches)
        snapshot, loaded = publish(adapted, batches)
        assert loaded.canary_problem == ""
        assert (loaded.pause_seconds, loaded.recomputed_tokens) == (0.0, 0)
        assert canary_complaint(snapshot.canary, loaded.canary, dtype="float32") == ""
        assert (
            max(
                np.abs(row.logprobs - scored).max()
                for row, scored in zip(snapshot.canary, loaded.canary, strict=True)
            )
            <= CLOSE
        )
        assert adapted.run(adapted.engine.pulse()).serves == str(version)
        for completion in adapted.generate():
            check(adapted, completion, version)


async def start(stack, num_tokens=8, **options):
    """A running request with some tokens."""
    request = make_request(**{"num_samples": 2, "max_tokens": 150, "stop": ()} | options)
    running = asyncio.create_task(stack.engine.generate(request))
    await until_all_have_tokens(stack.engine, num_tokens)
    return running


async def load(stack, batches):
    model = stack.models[WeightsVersion(0, batches)]
    snapshot = adapter_snapshot(model, batches, rows=CANARY_TOKENS)
    return await stack.engine.load(snapshot, fetch)


def test_a_running_request_keeps_its_adapter_to_its_end_and_newer_ones_serve_the_next(adapted):
    publish(adapted, 5)
    seeded = {"seed": 3, "num_samples": 2, "max_tokens": 150, "stop": ()}
    alone = [completion.token_ids.tolist() for completion in adapted.generate(**seeded)]

    async def scenario():
        old = await start(adapted, seed=3)
        await load(adapted, 6)
        new = await start(adapted, seed=4)
        folders = [Path(each.request.lora_path) for each in adapted.engine._adapters._serving]
        assert len(folders) == 2 and all(folder.exists() for folder in folders)
        await load(adapted, 7)  # a third, of which two run: it waits for its turn
        newest = await adapted.engine.generate(make_request())
        return await old, await new, newest, folders

    *answers, folders = adapted.run(scenario())
    for batches, completions in zip((5, 6, 7), answers, strict=True):
        for completion in completions:
            check(adapted, completion, WeightsVersion(0, batches))
    assert [completion.token_ids.tolist() for completion in answers[0]] == alone
    publish(adapted, 8)
    assert not any(folder.exists() for folder in folders)
    assert len(adapted.run(adapted.engine._llm.list_loras())) == 1


def test_the_canary_waits_for_nobody_where_the_engine_is_full(adapted):
    publish(adapted, 1)
    length = 400

    async def scenario():
        options = {"prompt": LONG_PROMPT[:8], "num_samples": MAX_NUM_SEQS, "max_tokens": length}
        running = [await start(adapted, **options)]
        running.append(await start(adapted, num_tokens=0, **options))
        loaded = await load(adapted, 2)
        most = max(await num_sampled(adapted.engine))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return loaded, most

    loaded, most = adapted.run(scenario())
    assert loaded.canary_problem == "" and len(loaded.canary) == len(CANARY_TOKENS)
    assert most < length / 2  # none had ended, so none had left its place


def test_weights_of_the_model_are_refused(adapted):
    with pytest.raises(WeightSyncError, match="start the worker without --max-lora-rank"):
        adapted.load(dataclasses.replace(adapter_snapshot(adapted.models[SECOND], 1), adapter=""))


def dropped(model, old):
    tensors = adapter_tensors(model)
    name = next(name for name in tensors if "v_proj.lora_B" in name)
    return {"tensors": {n: t for n, t in tensors.items() if n != name}}


def doubled(model, old):
    return {
        "tensors": {n: 2 * t if "lora_B" in n else t for n, t in adapter_tensors(model).items()}
    }


def stale(model, old):
    return {"tensors": adapter_tensors(old)}


def transposed(model, old):
    """Of o_proj, which is square: A and B are each other's transposes in shape."""
    tensors = adapter_tensors(model)
    for name in tensors:
        if "o_proj.lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            tensors |= {name: tensors[other].T.contiguous(), other: tensors[name].T.contiguous()}
    return {"tensors": tensors}


def wrongly_scaled(model, old):
    return {"config": adapter_config(model) | {"lora_alpha": 10}}


def without_a_layer(model, old):
    tensors = adapter_tensors(model)
    return {"tensors": {n: t for n, t in tensors.items() if ".layers.1." not in n}}


def of_other_names(model, old):
    tensors = adapter_tensors(model)
    return {"tensors": {n.replace("mlp.", "feed_forward."): t for n, t in tensors.items()}}


SABOTAGE = [
    dropped, doubled, stale, transposed, wrongly_scaled, without_a_layer, of_other_names,
]  # fmt: skip


@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_a_wrong_adapter_is_told_in_its_own_load_and_the_one_before_serves_on(adapted, sabotage):
    publish(adapted, 3)
    check_sabotage(adapted, sabotage)
    check(adapted, adapted.generate()[0], WeightsVersion(0, 3))
    assert len(adapted.run(adapted.engine._llm.list_loras())) == 1


def step_of(model, seed):
    """The adapter a step of the optimizer later."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * LEARNING_RATE)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_sabotage_of_small_steps_is_told_and_no_honest_step(model_folder, dtype):
    sent_as = getattr(torch, dtype)
    with open_stack(model_folder, max_lora_rank=6, dtype=dtype) as stack:
        for seed in range(NUM_SEEDS):
            old = make_adapter(model_folder, seed)
            for number, sabotage in enumerate(SABOTAGE):
                model = step_of(old, seed * len(SABOTAGE) + number)
                stack.models[WeightsVersion(0, 3)], stack.models[WeightsVersion(0, 4)] = old, model
                check_sabotage(stack, sabotage, dtype=sent_as)
                loaded = stack.load(adapter_snapshot(model, 4, rows=CANARY_TOKENS, dtype=sent_as))
                assert loaded.canary_problem == ""
                old = model


def check_sabotage(stack, sabotage, **options):
    model, old = (stack.models[WeightsVersion(0, batches)] for batches in (4, 3))
    snapshot = adapter_snapshot(model, 4, **options, **sabotage(model, old))
    with pytest.raises(WeightSyncError) as told:
        stack.load(snapshot)
    return str(told.value)
