"""An engine that has missed an update of 1e-6 a parameter, or a part of one, never serves."""

import pytest
import torch
from conftest import open_stack
from engine_stack import CANARY_TOKENS, FIRST
from tiny_models import canary_of, load_model, snapshot_of

from async_grpo.rollout.engine import EngineBrokenError
from async_grpo.weight_sync.sync_report import canary_complaint

pytestmark = pytest.mark.integration
LEARNING_RATE = 1e-6
NUM_UPDATES = 10


class Trainer:
    """AdamW at the smallest usual rate, and what it publishes after each step."""

    def __init__(self, stack):
        self.model = load_model(stack.folder)
        self.dtype = getattr(torch, stack.engine.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.num_steps = 0

    def step(self):
        self.num_steps += 1
        generator = torch.Generator().manual_seed(self.num_steps)
        ids = torch.randint(3, 78, (4, 32), generator=generator)
        self.optimizer.zero_grad()
        logprobs = self.model(ids).logits[:, :-1].log_softmax(-1)
        (-logprobs.gather(2, ids[:, 1:, None]).mean()).backward()
        self.optimizer.step()
        return self.snapshot()

    def snapshot(self):
        named = [(n, p.detach().to(self.dtype)) for n, p in self.model.named_parameters()]
        canary = canary_of(self.model, CANARY_TOKENS)
        return snapshot_of(named, self.num_steps, canary=canary)


def names_in(snapshot, buckets):
    """The parameters that begin in some of the snapshot's buckets."""
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    return [
        meta.name
        for meta in snapshot.tensors
        if any(0 <= meta.offset_bytes - offset < size for offset, size in pieces)
    ]


def withhold(stack, names):
    stack.run(stack.engine._llm.collective_rpc("withhold", args=(names,)))


def test_honest_updates_pass_and_one_that_was_withheld_is_told(stack):
    check_updates(stack)
    stack.serve(FIRST)


@pytest.mark.slow
def test_a_bfloat16_engine_tells_too_what_its_rounding_hides(model_folder):
    with open_stack(model_folder, dtype="bfloat16") as stack:
        check_first_update(stack)
        check_updates(stack)


def check_first_update(stack):
    """Of an engine that comes late too: what it misses is no form of vLLM's own."""
    snapshot = Trainer(stack).step()
    withhold(stack, names_in(snapshot, snapshot.buckets[1:2]))
    with pytest.raises(EngineBrokenError, match="read back other than they were sent"):
        stack.load(snapshot)
    stack.run(stack.engine._llm.collective_rpc("discard_weight_update"))


def check_updates(stack):
    withhold(stack, [])
    trainer = Trainer(stack)
    stack.load(trainer.snapshot())
    assert stack.run(stack.engine._llm.collective_rpc("unreadable_weights")) == [[]]
    for _ in range(NUM_UPDATES):
        snapshot = trainer.step()
        loaded = stack.load(snapshot)
        assert canary_complaint(snapshot.canary, loaded.canary, dtype=stack.engine.dtype) == ""
    if stack.engine.dtype == "float32":  # bfloat16 rounds by more than such an update moves
        old = canary_complaint(trainer.step().canary, loaded.canary, dtype="float32")
        assert "rounding explains 0.001 (mean 2e-05)" in old
    for chosen in (slice(None), slice(0, 1), slice(1, 2), slice(2, 3)):
        snapshot = trainer.step()
        withhold(stack, names_in(snapshot, snapshot.buckets[chosen]))
        with pytest.raises(EngineBrokenError, match="read back other than they were sent"):
            stack.load(snapshot)
        withhold(stack, [])
        stack.run(stack.engine._llm.collective_rpc("discard_weight_update"))
        stack.load(snapshot)
