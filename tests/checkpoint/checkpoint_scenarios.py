"""What ranks do in the tests of checkpointed tensors: train a little, save, load."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from oracle import tiny_model
from torch.distributed.tensor import distribute_tensor

from async_grpo.checkpoint.reader import Manifest
from async_grpo.checkpoint.resume import Start
from async_grpo.checkpoint.tensors import Staging, restore_learner, save_tensors
from async_grpo.config.train_config import TrainConfig
from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.training.fsdp import moments_of, shard
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks, make_mesh
from async_grpo.training.schedule import Clocks
from async_grpo.util.errors import CheckpointError

SAVES = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "untrained": {"tied": True, "steps": 0},
    "from groups": {"tied": True, "hybrid": True},
    "to groups": {"tied": True},
    "from whole": {"tied": True, "strategy": "NO_SHARD"},
    "from divided": {"tied": True, "strategy": "ZERO1"},
    "to divided": {"tied": True},
}
LOADS = SAVES | {
    "from groups": {"tied": True},
    "to groups": {"tied": True, "hybrid": True},
    "from whole": {"tied": True, "strategy": "ZERO1"},
    "from divided": {"tied": True},
    "to divided": {"tied": True, "strategy": "ZERO1"},
}
LIBRARY = ("adamw_8bit", "paged_adamw", "paged_adamw_8bit")


def make(seed, *, tied, hybrid=False, strategy="FULL_SHARD", optim="adamw"):
    """A learner of random weights, with biases of one and of three numbers.

    `hybrid`: two groups of ranks, where they are even, whose AdamW steps on the host.
    """
    torch.manual_seed(seed)
    model = tiny_model(tied=tied)
    model.register_parameter("one", torch.nn.Parameter(torch.zeros(1)))
    model.register_parameter("three", torch.nn.Parameter(torch.zeros(3)))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    num_ranks = dist.get_world_size()
    in_groups = hybrid and num_ranks % 2 == 0
    config = TrainConfig(
        model_name_or_path="m", data_path="d", learning_rate=1e-2,
        offload="optimizer" if hybrid else "none", fsdp_sharding_strategy=strategy,
        optim=optim,
    )  # fmt: skip
    shard_ranks = num_ranks // 2 if in_groups else config.memory.shard_ranks
    mesh = make_mesh("cpu", num_ranks=num_ranks, shard_ranks=shard_ranks)
    ranks = Ranks(dist.get_rank(), num_ranks, torch.device("cpu"), mesh)
    return Learner(shard(PolicyModel(model), mesh), config, ranks)


def train(learner, *, steps):
    """Updates with gradients that do not depend on the ranks."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for parameter in learner.policy.parameters():
            whole = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        learner.step.optimizer.step()
        learner.step.clocks = learner.step.clocks.after(4)


def whole(learner):
    """Parameters and moments, gathered."""
    optimizer = learner.step.optimizer
    named = dict(hf_named_parameters(learner.policy))
    tensors = {name: p.detach().full_tensor().clone() for name, p in named.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        for name, parameter in named.items():
            if state := moments_of(optimizer, parameter):
                tensors[f"{moment}.{name}"] = state[moment].full_tensor().clone()
    steps = {float(state["step"]) for state in optimizer.state.values() if state}
    return tensors | {"steps": steps}


def save(rank, *, checkpoint, steps=3, **options):
    """The state when it was staged; training goes on before it is written."""
    learner = make(0, **options)
    train(learner, steps=steps)
    torch.manual_seed(100 + rank)
    state = whole(learner)
    staged = Staging().copy(learner)
    train(learner, steps=1)
    group = dist.new_group(backend="gloo")
    save_tensors(staged, Path(checkpoint), group=group)
    return state, torch.rand(3) if rank >= 0 else None


def load(rank, *, checkpoint, saved_by, steps=3, **options):
    """The state after loading into another policy, and this rank's next random numbers."""
    learner = make(7, **options)
    train(learner, steps=2)
    learner.step.optimizer.state.clear()
    restore_learner(learner, start_at(checkpoint, saved_by=saved_by, steps=steps))
    assert learner.step.clocks == Clocks(steps, 4 * steps)
    return whole(learner), torch.rand(3)


def library_moments(rank, *, checkpoint, optim, saved_by=0):
    """(moments of bitsandbytes' AdamW, weights a step later), saved or loaded; or the error."""
    learner = make(7 if saved_by else 0, tied=True, optim=optim)
    learner.step.optimizer.adamw.args.min_8bit_size = 0
    try:
        if saved_by:
            restore_learner(learner, start_at(checkpoint, saved_by=saved_by))
        else:
            train(learner, steps=3)
            group = dist.new_group(backend="gloo")
            save_tensors(Staging().copy(learner), Path(checkpoint), group=group)
    except CheckpointError as error:
        return str(error)
    names = {parameter: name for name, parameter in hf_named_parameters(learner.policy)}
    found = {n: each.clone() for n, each in learner.step.optimizer.moments(names).items()}
    train(learner, steps=1)
    named = hf_named_parameters(learner.policy)
    return found, {name: each.detach().full_tensor().clone() for name, each in named}


def start_at(checkpoint, *, saved_by, steps=3):
    state = {"clocks": {"steps": steps, "samples": 4 * steps}}
    manifest = Manifest(batches=steps, world_size=saved_by, config={}, hashes={}, state=state)
    return Start(Path(checkpoint), manifest)


def load_and_fail(rank, *, checkpoint, unreadable_on):
    """The error that this rank gets when one rank cannot read."""
    learner = make(7, tied=True)
    if rank == unreadable_on:
        checkpoint = os.path.join(checkpoint, "nothing")
        os.makedirs(checkpoint, exist_ok=True)
    try:
        restore_learner(learner, start_at(checkpoint, saved_by=2))
    except CheckpointError as error:
        return str(error)
    return ""


def save_and_fail(rank, *, checkpoint, full_on):
    """The error that this rank gets when one rank's disk is full."""
    staged = Staging().copy(make(0, tied=True))
    if rank == full_on:
        checkpoint = "/dev/full/no"
    try:
        save_tensors(staged, Path(checkpoint), group=dist.new_group(backend="gloo"))
    except CheckpointError as error:
        return str(error)
    return ""


def save_all(rank, *, root):
    """Everything that the tests load; one set of processes."""
    saved = {}
    for name, options in SAVES.items():
        if rank == 0:
            (Path(root) / name).mkdir(parents=True)
        dist.barrier()
        saved[name] = save(rank, checkpoint=f"{root}/{name}", **options)
    for optim in LIBRARY:
        if rank == 0:
            (Path(root) / optim).mkdir(parents=True)
        dist.barrier()
        saved[optim] = library_moments(rank, checkpoint=f"{root}/{optim}", optim=optim)
    return saved, save_and_fail(rank, checkpoint=root, full_on=dist.get_world_size() - 1)


def load_all(rank, *, root, saved_by):
    loaded = {
        name: load(rank, checkpoint=f"{root}/{name}", saved_by=saved_by, **options)
        for name, options in LOADS.items()
    }
    for optim in LIBRARY:
        loaded[optim] = library_moments(
            rank, checkpoint=f"{root}/{optim}", optim=optim, saved_by=saved_by
        )
    last = dist.get_world_size() - 1
    return loaded, load_and_fail(rank, checkpoint=f"{root}/tied", unreadable_on=last)
