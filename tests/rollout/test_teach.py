"""A teacher's answers, held to one float64 forward of its model for each output."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracle import VOCAB_SIZE, oracle_twin, tiny_model
from test_logprob_worker import TEMPERATURE, folder, make_request

from async_grpo.config.roles import teacher
from async_grpo.model.model_folder import hash_model
from async_grpo.rollout import logprob_worker as module
from async_grpo.rollout.logprob_worker import LogprobWorker
from async_grpo.types import HeadRequest, Payload
from async_grpo.util.errors import WorkerError

__all__ = ["folder"]  # a fixture
TAU, TOP_K = 1.7, 5
NARROW = VOCAB_SIZE - 9  # the student's vocabulary
WIDTHS = {0: VOCAB_SIZE, NARROW: NARROW, VOCAB_SIZE + 9: VOCAB_SIZE}  # asked, and over which


@pytest.fixture(scope="module")
def worker(folder):
    return LogprobWorker(folder, worker_id="t0", max_tokens=200, role=teacher("math"))


def asked(kind, *, vocab_size=0, seed=0):
    request = make_request(seed, version=None)
    of_both = tuple(
        tuple(ids % NARROW for ids in rows)
        for rows in (request.prompt_token_ids, request.output_token_ids)
    )
    return replace(
        request,
        prompt_token_ids=of_both[0],
        output_token_ids=of_both[1],
        payload=Payload(kind, TOP_K if kind == "topk" else 0, TAU),
        vocab_size=vocab_size,
    )


def whole(request, width):
    """Logits [L, width] of every output in float64, each of a forward of its own."""
    twin = oracle_twin(tiny_model(tied=True, seed=0))
    for prompt, ids in zip(request.prompt_token_ids, request.output_token_ids, strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))
        with torch.no_grad():
            logits = twin(input_ids=tokens[None], use_cache=False).logits[0]
        yield logits[len(prompt) - 1 : -1, :width], torch.from_numpy(ids.astype(np.int64))


def taught(worker, request):
    scores, *payloads = asyncio.run(worker.teach(request))
    assert len(scores) == len(payloads) == len(request.output_token_ids)
    return scores, payloads


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-5)


@pytest.mark.parametrize("vocab_size", WIDTHS)
@pytest.mark.parametrize("kind", ["topk", "hidden", "logits"])
def test_every_payload_and_label_is_that_of_whole_distributions(worker, kind, vocab_size):
    request, width = asked(kind, vocab_size=vocab_size), WIDTHS[vocab_size]
    scores, payloads = taught(worker, request)
    _, head = asyncio.run(worker.head(HeadRequest()))
    for got, payload, (logits, ids) in zip(scores, payloads, whole(request, width), strict=True):
        at_temperature = (logits / TEMPERATURE).log_softmax(-1)
        assert_close(got, at_temperature.gather(1, ids[:, None])[:, 0])
        if kind == "topk":
            logprobs = (logits / TAU).log_softmax(-1)
            chosen = torch.from_numpy(payload["ids"].astype(np.int64))
            assert payload["ids"].dtype == np.int32
            assert (chosen.sort(1)[0] == logprobs.topk(TOP_K).indices.sort(1)[0]).all()
            assert_close(payload["logprobs"], logprobs.gather(1, chosen))
            rest = 1 - logprobs.exp().gather(1, chosen).sum(1)
            assert_close(payload["tail"], rest.log())
        elif kind == "logits":
            assert payload["logits"].shape == (len(ids), width)
            assert_close(payload["logits"], logits)
        else:
            assert_close(payload["hidden"] @ head["weight"][:width].T, logits)


def test_outputs_with_other_wishes_share_no_forward_and_none_is_mixed_up(worker):
    requests = [asked(kind, seed=seed) for seed in range(4) for kind in ("topk", "logits")]

    async def scenario():
        return await asyncio.gather(*map(worker.teach, requests))

    for request, (_, *payloads) in zip(requests, asyncio.run(scenario()), strict=True):
        names = {"topk": {"ids", "logprobs", "tail"}, "logits": {"logits"}}
        for payload, (logits, _) in zip(payloads, whole(request, VOCAB_SIZE), strict=True):
            assert set(payload) == names[request.payload.kind]
            if "logits" in payload:
                assert_close(payload["logits"], logits)


@pytest.mark.parametrize(("vocab_size", "limit"), [(NARROW, NARROW), (0, VOCAB_SIZE)])
def test_a_token_that_one_of_both_models_does_not_have_is_refused(worker, vocab_size, limit):
    request = asked("topk", vocab_size=vocab_size)
    strange = request.output_token_ids[1].copy()
    strange[-1] = limit
    outputs = (request.output_token_ids[0], strange, *request.output_token_ids[2:])
    said = rf"every token must be below {limit}, which .* and the student both have, got {limit}: "
    with pytest.raises(WorkerError, match=said):
        asyncio.run(worker.teach(replace(request, output_token_ids=outputs)))
    taught(worker, request)  # it goes on


def test_more_tokens_than_the_vocabulary_has_are_refused_in_one_sentence(worker):
    request = replace(asked("topk"), payload=Payload("topk", VOCAB_SIZE + 1, 1.0))
    with pytest.raises(WorkerError, match="lower --gkd-top-k"):
        asyncio.run(worker.teach(request))


def test_a_teacher_says_what_its_payloads_are_made_of_and_which_model_it_is(
    worker, folder, monkeypatch
):
    here = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: here)
    info = asyncio.run(worker.info())
    assert info.model_hash == hash_model(folder)
    assert (info.vocab_size, info.item_size) == (VOCAB_SIZE, 4)
    _, payloads = taught(worker, asked("hidden"))
    assert payloads[0]["hidden"].shape[1] == info.hidden_size
