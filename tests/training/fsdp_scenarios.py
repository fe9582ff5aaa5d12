"""What gloo ranks do in `test_fsdp.py`: every scenario of a world runs in one set of processes.

A scenario is a function of the rank; what it returns, the tests judge.
"""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from adapted_models import ALL_KINDS, adapted
from effort import FULL
from learners import gradient_step
from loading_scenarios import differences
from oracle import (
    make_row,
    make_sample,
    oracle_twin,
    random_samples,
    sample_of_rows,
    sent,
    tiny_config,
    tiny_model,
)
from tensor_watchers import LargestTensor
from test_experts import CHOSEN, EXPERTS, LAYERS, model_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForCausalLM

from async_grpo.checkpoint.export import export_hf
from async_grpo.config.train_config import TrainConfig
from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate, collate_pairs
from async_grpo.model.policy import PolicyModel, hf_named_parameters, trained_parameters
from async_grpo.model.served import served
from async_grpo.training.fsdp import (
    HostAdamW,
    TwinAdamW,
    iter_device_tensors,
    iter_full_tensors,
    reshard,
    shard,
)
from async_grpo.training.learner import HeldOutPairs, Learner
from async_grpo.training.ranks import Ranks, make_mesh
from async_grpo.types import EndOfStep, Minibatch, TrainingPair

CONFIG = TrainConfig(
    model_name_or_path="m",
    data_path="d",
    max_staleness=1,
    kl_coefficient=0.1,
    learning_rate=1e-2,
    loss_chunksize=7,
    num_warmup_steps=5,
    max_grad_norm=0.0,
)
NUM_PARTITIONS = 50 if FULL else 4
CHUNK_SIZE, VOCAB_SIZE, NUM_TOKENS = 8, 2000, 300


def make_samples(model):
    """Five short samples and one that is longer than all the rest together."""
    rng = np.random.default_rng(3)
    short = random_samples(rng, 5, branching=0.9, model=oracle_twin(model))
    tokens = rng.integers(64, size=200)
    values = rng.normal(-3, 0.1, size=(2, 199))
    long = make_sample(
        tokens[:1], tokens[1:], behaviour=values[0], reference=values[1], advantage=0.7
    )
    assert sum(sample.num_tokens for sample in short) < long.num_tokens
    return [*short, long]


def make_pairs(count):
    """Random demonstrations, the same on every rank."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 12, size=(count, 2))
    return [
        TrainingPair(*(rng.integers(64, size=n, dtype=np.int32) for n in pair)) for pair in lengths
    ]


def usual_rounds(rank, samples):
    """Two rounds: in the first only rank 0 has samples, in the second the last has the long one."""
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return [samples[:2], samples[2:]]
    nobody = [[]] * (num_ranks - 2)
    return [[samples[:2], *nobody, []][rank], [samples[2:5], *nobody, samples[5:]][rank]]


def sent_in_rounds(samples, **options):
    """What every rank is given by `usual_rounds`."""
    parts = [usual_rounds(rank, samples) for rank in range(dist.get_world_size())]
    return sent(*[[s for part in rounds for s in part] for rounds in parts], **options)


def empty_rank_rounds(rank, samples):
    """Only rank 0 ever has samples; alone, it has none in the first round."""
    if dist.get_world_size() == 1:
        return [[], samples]
    return [[] if rank else part for part in (samples[:2], samples[2:])]


def random_rounds(seed):
    """Every sample in any round on any rank."""

    def rounds(rank, samples):
        rng = np.random.default_rng(seed)
        num_rounds = int(rng.integers(1, 4))
        places = rng.integers(num_rounds * dist.get_world_size(), size=len(samples))
        mine = [rank + round_index * dist.get_world_size() for round_index in range(num_rounds)]
        return [[samples[i] for i in np.flatnonzero(places == place)] for place in mine]

    return rounds


def mesh_of(config=CONFIG, *, hybrid):
    """As `config` has it, or two groups: of four ranks 2 x 2, of two ranks 2 x 1."""
    num_ranks = dist.get_world_size()
    shard_ranks = num_ranks // 2 if hybrid else config.memory.shard_ranks
    return make_mesh("cpu", num_ranks=num_ranks, shard_ranks=shard_ranks)


def make_step(*, tied=True, dtype=torch.float32, config=CONFIG, hybrid=False, kind="", **options):
    """(gradient step, policy, and a list that gets the gradient of every step taken).

    `kind`: of an adapter that trains.
    """
    model = tiny_model(tied=tied, dtype=dtype)
    policy = adapted(model, **ALL_KINDS[kind]) if kind else PolicyModel(model)
    shard(policy, mesh_of(config, hybrid=hybrid), **options)
    return equip(policy, config)


def equip(policy, config=CONFIG):
    step = gradient_step(policy, config)
    gradients = []
    optimizer = step.optimizer
    while isinstance(optimizer, TwinAdamW):
        optimizer = optimizer.adamw
    optimizer.register_step_pre_hook(lambda *_: gradients.append(whole_gradient(policy)))
    return step, policy, gradients


def whole_gradient(policy):
    parameters = trained_parameters(policy)
    return {n: getattr(p.grad, "full_tensor", p.grad.clone)().clone() for n, p in parameters}


def iter_whole(policy):
    """Parameters as they leave the trainer, on every rank."""
    reshard(policy)
    for name, tensor in iter_device_tensors(served(policy, divided=True)):
        yield name, tensor.clone()


def whole(policy):
    return {n: p.detach().full_tensor().clone() for n, p in hf_named_parameters(policy)}


def accumulate(step, parts, dtype=torch.float32):
    for part in parts:
        packed = collate(part, aggregation="sample-mean", scores={"reference": 0}, dtype=dtype)
        step.accumulate(packed)


def one_step(rank, *, rounds=usual_rounds, tied=True, dtype=torch.float32, **options):
    """A streamed step over the ranks: its gradient, its result, the parameters after it."""
    samples = make_samples(tiny_model(tied=tied))
    step, policy, gradients = make_step(tied=tied, dtype=dtype, **options)
    accumulate(step, rounds(rank, samples), dtype)
    reduced = any(parameter.grad is not None for parameter in policy.parameters())
    result = step.finish(len(samples))
    return {
        "gradient": gradients[0],
        "result": result,
        "parameters": dict(iter_whole(policy)),
        "reduced": reduced,  # before the step ended
        "held": held_bytes(step, policy),
    }


def held_bytes(step, policy):
    """What the rank holds of masters, gradients and moments after a step, where it computes."""
    optimizer = step.optimizer
    on_host = isinstance(getattr(optimizer, "adamw", optimizer), HostAdamW)
    moments = [] if on_host or isinstance(optimizer, HostAdamW) else optimizer.state.values()
    held = [parameter for parameter in policy.parameters()] * 2  # with a gradient of each
    held += [state[name] for state in moments for name in ("exp_avg", "exp_avg_sq")]
    return sum(tensor.to_local().nbytes for tensor in held)


def partitions(rank, *, config):
    """[(gradient, result)] of the same samples, spread at random."""
    samples = make_samples(tiny_model(tied=True))
    frozen = config.but(learning_rate=1e-30)
    step, _, gradients = make_step(dtype=torch.float64, config=frozen)
    results = []
    for seed in range(NUM_PARTITIONS):
        accumulate(step, random_rounds(seed)(rank, samples), torch.float64)
        results.append(step.finish(len(samples)))
    return list(zip(gradients, results, strict=True))


def skipped_steps(rank, *, config):
    """A step that is not finite on the last rank only, one that is forgotten, one whose groups
    were all dropped, then a real one."""
    samples = make_samples(tiny_model(tied=True))
    step, policy, gradients = make_step(config=config)
    before = whole(policy)
    bad = collate(samples[:2], aggregation="sample-mean")
    if rank == dist.get_world_size() - 1:
        bad.advantages[0] = math.nan
    accumulate(step, [samples[2:3]])
    step.accumulate(bad)
    results = [step.finish(4)]
    step.accumulate(bad)
    step.discard()
    accumulate(step, [[]])
    results.append(step.finish(0))
    unmoved = all(torch.equal(before[name], now) for name, now in whole(policy).items())
    accumulate(step, usual_rounds(rank, samples))
    results.append(step.finish(len(samples)))
    return {"results": results, "unmoved": unmoved, "gradients": gradients}


def zero_advantages(rank, *, config):
    """Two steps: a real one, then one in which every advantage is 0."""
    samples = make_samples(tiny_model(tied=True))
    flat = [replace(sample, advantage=0.0) for sample in samples]
    step, policy, gradients = make_step(config=config.but(kl_coefficient=0.0))
    accumulate(step, usual_rounds(rank, samples))
    step.finish(len(samples))
    before = whole(policy)
    accumulate(step, usual_rounds(rank, flat))
    result = step.finish(len(samples))
    moved = any(not torch.equal(before[name], now) for name, now in whole(policy).items())
    return {"result": result, "gradient": gradients[1], "moved": moved}


def largest_tensors(rank, *, tied):
    """The most elements of any tensor of a training pass over a large vocabulary."""
    config = tiny_config(tied=tied)
    config.vocab_size = VOCAB_SIZE
    policy = PolicyModel(Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED))
    shard(policy, init_device_mesh("cpu", (dist.get_world_size(),)))
    row = np.random.default_rng(rank).integers(VOCAB_SIZE, size=NUM_TOKENS, dtype=np.int32)
    packed = collate_pairs([(row[:1], row)])
    with LargestTensor() as largest:
        scored = policy(packed, temperature=0.7, chunk_size=CHUNK_SIZE)
        (scored.logprobs.sum() + scored.entropy.sum()).backward()
    assert len(scored.logprobs) == NUM_TOKENS
    return largest.num_elements


def layers_after_forward(rank, *, strategy, source, target):
    """Whether the layers of a learner's policy are whole between forward and backward pass."""
    config = CONFIG.but(
        model_name_or_path=source, output_dir=target, fsdp_sharding_strategy=strategy
    )
    policy = build_learner(rank, config).policy
    samples = make_samples(tiny_model(tied=True))
    packed = collate(samples, aggregation="sample-mean")
    scored = policy(packed, temperature=1.0, chunk_size=CHUNK_SIZE)
    are_whole = [not isinstance(next(layer.parameters()), DTensor) for layer in policy.layers]
    scored.logprobs.sum().backward()
    return are_whole


def learner_of_a_run(rank, *, source, target, **options):
    """A step as a run takes it: (whether gradients were reduced before its end, its result)."""
    config = CONFIG.but(model_name_or_path=source, output_dir=target, **options)
    learner = build_learner(rank, config)
    samples = make_samples(tiny_model(tied=True))
    for index, part in enumerate(usual_rounds(rank, samples)):
        learner.accumulate(Minibatch(index, tuple(part)))
    reduced = any(parameter.grad is not None for parameter in learner.policy.parameters())
    end = EndOfStep(0, 0, True, num_samples=6, num_tokens=NUM_TOKENS, sent=sent_in_rounds(samples))
    return reduced, learner.update(end)


def make_ranks(rank, config=CONFIG, *, hybrid=False):
    return Ranks(rank, dist.get_world_size(), torch.device("cpu"), mesh_of(config, hybrid=hybrid))


def build_learner(rank, config):
    hybrid = config.memory.fsdp_sharding_strategy == "HYBRID_SHARD"
    return Learner.build(config, make_ranks(rank, config, hybrid=hybrid))


def held_out(rank, *, source, target):
    """The held-out loss before and after a step, and the weights after it."""
    config = CONFIG.but(model_name_or_path=source, output_dir=target, algorithm="sft")
    learner = build_learner(rank, config)
    evaluation = HeldOutPairs(make_pairs(7), learner, make_ranks(rank))
    before = evaluation.loss()
    samples = make_samples(tiny_model(tied=True))
    for index, part in enumerate(usual_rounds(rank, samples)):
        learner.accumulate(Minibatch(index, tuple(part)))
    tallies = sent_in_rounds(samples, aggregation="token-mean")
    learner.update(EndOfStep(0, 0, True, num_samples=6, num_tokens=300, sent=tallies))
    after = evaluation.loss()
    return {"before": before, "after": after, "weights": whole(learner.policy)}


def gathered(rank, *, source, target):
    """What rank 0 receives of whole parameters after an evaluation in bf16, and an export."""
    _, policy, _ = make_step(mixed_precision="bf16")
    with torch.no_grad():
        policy(collate([], aggregation="sample-mean"), temperature=1.0, chunk_size=1)
    names = [(name, tensor.clone()) for name, tensor in iter_full_tensors(policy)]
    export_hf(policy, source_folder=source, target=target)
    return names


def exported_in_bf16(rank, *, source, target):
    """The types of what the ranks gather for an export in bf16."""
    _, policy, _ = make_step()
    seen, whole_of = set(), DTensor.full_tensor

    def watched(tensor, **options):
        seen.add(tensor.dtype)
        return whole_of(tensor, **options)

    DTensor.full_tensor = watched
    try:
        assert not export_hf(policy, source_folder=f"{source}-bf16", target=f"{target}-bf16")
    finally:
        DTensor.full_tensor = whole_of
    return seen


def adapter_exports(rank, *, source, target):
    """[N] log-probabilities after a step of an adapter's, which is exported, and merged."""
    options = {"lora_rank": 4, "lora_alpha": 200.0}
    learner = build_learner(rank, CONFIG.but(model_name_or_path=source, **options))
    samples = make_samples(tiny_model(tied=True))
    for index, part in enumerate(usual_rounds(rank, samples)):
        learner.accumulate(Minibatch(index, tuple(part)))
    tallies = sent_in_rounds(samples, aggregation="sample-mean")
    learner.update(EndOfStep(0, 0, True, num_samples=6, num_tokens=300, sent=tallies))
    policy, packed = learner.policy, collate(samples, aggregation="sample-mean")
    with torch.no_grad():
        scored = policy(packed, temperature=1.0, chunk_size=CHUNK_SIZE)
    for end in ("adapter", "merged"):
        of_adapter = end == "adapter"
        export_hf(policy, source_folder=source, target=f"{target}-{end}", of_adapter=of_adapter)
    return scored.logprobs


class TermSeen:
    """A head term that keeps what it was handed of a teacher's rows; it costs nothing."""

    name = "divergence"

    def __init__(self):
        self.rows = []

    def value(self, logprobs, rows):
        self.rows.append({name: values.clone() for name, values in rows.items()})
        return logprobs.new_zeros(len(logprobs))

    def gradient(self, logprobs, rows):
        return torch.zeros_like(logprobs)


def taught_in_bf16(rank):
    """A teacher's scores as the batcher sent them, and as a head term sees them in bf16."""
    _, policy, _ = make_step(mixed_precision="bf16")
    rng = np.random.default_rng(rank)
    samples = []
    for ordinal in range(2):
        made = make_sample([1, 2], [3, 4, 5], ordinal=ordinal)
        said = rng.normal(-7, 3, (3, 4)).astype(np.float32)
        tail = rng.normal(-7, 3, 3).astype(np.float32)
        own = {"teacher.logprobs": said, "teacher.tail": tail}
        samples.append(replace(made, scores=own))
    packed, term = collate(samples, aggregation="sample-mean"), TermSeen()
    scored = policy(packed, temperature=1.0, chunk_size=CHUNK_SIZE, terms=(term,))
    (scored.logprobs.sum() + scored.terms["divergence"].sum()).backward()
    return {
        name: (sent, torch.cat([rows[name] for rows in term.rows]))
        for name, sent in packed.scores.items()
    }


def adapted_mixture(*, sharded, checkpointing=False):
    """One step of a mixture whose experts have adapters: the gradient, and what leaves it."""
    policy = adapted(model_of("qwen3_moe"), lora_rank=2)
    assert policy.adapter.target_parameters
    rounds = [routed_samples()]
    if sharded:
        shard(policy, mesh_of(hybrid=False), activation_checkpointing=checkpointing)
        rounds = usual_rounds(dist.get_rank(), routed_samples())
    step, policy, gradients = equip(policy, CONFIG.but(kl_coefficient=0.0))
    for part in rounds:
        step.accumulate(collate(part, aggregation="sample-mean", dtype=torch.float64))
    step.finish(6)
    named = ((name, each.make()) for name, each in served(policy).items())
    return {
        "gradient": gradients[0],
        "served": {n: getattr(t, "full_tensor", t.clone)() for n, t in named},
    }


def mixture(rank, *, checkpointing=False):
    """Two steps of a mixture of experts with replayed choices and a balancing loss.

    The second one balances by the choices that all ranks had in the first, of one minibatch each.
    """
    config = CONFIG.but(balance_coefficient=0.3, kl_coefficient=0.0)
    policy = PolicyModel(model_of("qwen3_moe"))
    shard(policy, mesh_of(hybrid=False), activation_checkpointing=checkpointing)
    step, policy, gradients = equip(policy, config)
    samples, results = routed_samples(), []
    rounds = usual_rounds(rank, samples)
    for parts in ([[*rounds[0], *rounds[1]]], rounds):
        for part in parts:
            step.accumulate(collate(part, aggregation="sample-mean", dtype=torch.float64))
        results.append(step.finish(len(samples)))
    return {"gradients": gradients, "results": results, "shares": step.expert_shares}


def routed_samples():
    """Of random tokens; of all but the last the engine has told its choices of experts."""
    rng = np.random.default_rng(7)
    samples = []
    for length in (3, 5, 2, 6, 4, 30):
        row = make_row(rng.integers(48, size=4).tolist(), rng.integers(48, size=length).tolist())
        choices = [rng.permutation(EXPERTS)[:CHOSEN] for _ in range(LAYERS * (row.num_tokens - 1))]
        experts = np.stack(choices).reshape(-1, LAYERS * CHOSEN).astype(np.uint8)
        row = replace(row, experts=experts if length < 30 else None)
        samples.append(sample_of_rows([row], advantage=rng.normal(), ordinal=len(samples)))
    return samples


@contextmanager
def compiling_by(backend):
    """Have torch compile by a backend in place of its own, which needs a compiler of C."""
    usual = torch.compile
    torch.compile = functools.partial(usual, backend=backend)
    try:
        yield
    finally:
        torch.compile = usual


def no_compiler(graph, inputs):
    raise RuntimeError("there is no compiler")


def compiled(rank, *, source, target):
    """Compiled steps, of one rank, since tracing takes seconds.

    What torch's own backend gets is traced for this one, too: operations in place become others,
    and lengths stay free.
    """
    if dist.get_world_size() > 1:
        return {}
    with compiling_by(no_compiler):  # first: what was compiled is kept
        learner = learner_of_a_run(rank, source=source, target=target, use_torch_compile=True)
    with compiling_by("aot_eager"):
        return {
            "compiled": one_step(rank, compile=True),
            "compiled checkpointing": one_step(rank, compile=True, activation_checkpointing=True),
            "learner without a compiler": learner,
            "compiled graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        }


def world(rank, *, source, target, models):
    """Every scenario: starting processes costs more than running it."""
    f64 = torch.float64
    deferred = CONFIG.but(defer_gradient_sync=True)
    whole_model, divided = (CONFIG.but(fsdp_sharding_strategy=s) for s in ("NO_SHARD", "ZERO1"))
    return {
        "tied": one_step(rank),
        "untied": one_step(rank, tied=False),
        "empty rank": one_step(rank, rounds=empty_rank_rounds),
        "tied f64": one_step(rank, dtype=f64),
        "untied f64": one_step(rank, tied=False, dtype=f64),
        "checkpointing": one_step(rank, activation_checkpointing=True),
        "one layer in two": one_step(rank, activation_checkpointing=2),
        "bf16": one_step(rank, mixed_precision="bf16"),
        "taught in bf16": taught_in_bf16(rank),
        "kept": one_step(rank, keep_gathered=True),
        "kept untied f64": one_step(rank, tied=False, dtype=f64, keep_gathered=True),
        "kept checkpointing": one_step(rank, keep_gathered=True, activation_checkpointing=True),
        "deferred tied": one_step(rank, config=deferred),
        "deferred untied": one_step(rank, tied=False, config=deferred),
        "deferred empty rank": one_step(rank, rounds=empty_rank_rounds, config=deferred),
        "deferred tied f64": one_step(rank, dtype=f64, config=deferred),
        "deferred untied f64": one_step(rank, tied=False, dtype=f64, config=deferred),
        "deferred checkpointing": one_step(rank, config=deferred, activation_checkpointing=True),
        "deferred bf16": one_step(rank, config=deferred, mixed_precision="bf16"),
        "deferred kept": one_step(rank, config=deferred, keep_gathered=True),
        "hybrid tied": one_step(rank, hybrid=True),
        "hybrid empty rank": one_step(rank, hybrid=True, rounds=empty_rank_rounds),
        "hybrid checkpointing": one_step(rank, hybrid=True, activation_checkpointing=True),
        "hybrid untied f64": one_step(rank, hybrid=True, tied=False, dtype=f64),
        "hybrid deferred f64": one_step(rank, hybrid=True, dtype=f64, config=deferred),
        "offloaded f64": one_step(rank, dtype=f64, offload=True),
        "offloaded hybrid deferred": one_step(rank, offload=True, hybrid=True, config=deferred),
        "offloaded hybrid": one_step(rank, offload=True, hybrid=True),
        "adapter all linear": one_step(rank, dtype=f64, kind="all linear"),
        "adapter decomposed": one_step(rank, dtype=f64, kind="decomposed", config=deferred),
        "adapter norms too": one_step(rank, dtype=f64, kind="norms too", hybrid=True),
        "adapter some, rank-stabilised": one_step(
            rank, dtype=f64, kind="some, rank-stabilised", config=divided
        ),
        "adapter in 4 bits": one_step(rank, dtype=f64, kind="in 4 bits"),
        "adapter in 8 bits": one_step(rank, dtype=f64, kind="in 8 bits", config=divided),
        "host optimizer": one_step(rank, config=CONFIG.but(offload="optimizer")),
        "host optimizer hybrid f64": one_step(
            rank, config=CONFIG.but(offload="optimizer"), hybrid=True, dtype=f64
        ),
        "whole": one_step(rank, config=whole_model),
        "whole empty rank": one_step(rank, rounds=empty_rank_rounds, config=whole_model),
        "whole untied f64": one_step(rank, tied=False, dtype=f64, config=whole_model),
        "whole offloaded": one_step(rank, offload=True, config=whole_model),
        "whole deferred f64": one_step(
            rank, dtype=f64, config=whole_model.but(defer_gradient_sync=True)
        ),
        "divided": one_step(rank, config=divided),
        "divided empty rank": one_step(rank, rounds=empty_rank_rounds, config=divided),
        "divided checkpointing": one_step(rank, config=divided, activation_checkpointing=True),
        "divided untied f64": one_step(rank, tied=False, dtype=f64, config=divided),
        "divided deferred f64": one_step(
            rank, dtype=f64, config=divided.but(defer_gradient_sync=True)
        ),
        "divided host optimizer f64": one_step(
            rank, dtype=f64, config=divided.but(offload="optimizer")
        ),
        "divided skipped": skipped_steps(rank, config=divided),
        "partitions": partitions(rank, config=CONFIG),
        "divided partitions": partitions(rank, config=divided),
        "deferred partitions": partitions(rank, config=deferred),
        "skipped": skipped_steps(rank, config=CONFIG),
        "deferred skipped": skipped_steps(rank, config=deferred),
        "zero": zero_advantages(rank, config=CONFIG),
        "deferred zero": zero_advantages(rank, config=deferred),
        "largest": {tied: largest_tensors(rank, tied=tied) for tied in (True, False)},
        "whole layers": {
            strategy: layers_after_forward(rank, strategy=strategy, source=source, target=target)
            for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "ZERO1")
        },
        "learner": learner_of_a_run(rank, source=source, target=target, defer_gradient_sync=True),
        "learner that divides": learner_of_a_run(
            rank, source=source, target=target, fsdp_sharding_strategy="ZERO1"
        ),
        "held out": held_out(rank, source=source, target=target),
        "gathered": gathered(rank, source=source, target=target),
        "in bf16": exported_in_bf16(rank, source=source, target=target),
        "adapter": adapter_exports(rank, source=source, target=target),
        "mixture": mixture(rank),
        "adapted mixture": adapted_mixture(sharded=True),
        "adapted mixture checkpointing": adapted_mixture(sharded=True, checkpointing=True),
        "mixture checkpointing": mixture(rank, checkpointing=True),
        "loaded": differences(rank, models=models),
    } | compiled(rank, source=source, target=target)
