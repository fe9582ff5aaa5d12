"""Runs to be planned, without files."""

from dataclasses import replace

from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.planning.asked import CPU, PUBLISHED, Asked, Fleet, fleet_of, shape_of_config
from async_grpo.planning.measured import RateSources, work_of
from async_grpo.planning.rates import assumed_lengths


def asked(
    model="qwen2.5-7b", *, devices="16", kl=0.0, workers=(), tensor_parallel=1, **options
) -> Asked:
    """A run on so many devices of an H100, or on two cores where `devices` is empty."""
    given = {"batch_size": 64, "max_generation_tokens": 1024, "kl_coefficient": kl} | options
    train = TrainConfig(model_name_or_path="m", data_path="d", **given)
    tables = [
        WorkerConfig(
            model_path="m", max_model_len=4096, num_workers=2, max_num_seqs=256,
            tensor_parallel_size=tensor_parallel,
        ),
        *([WorkerConfig(mode="logprob", model_path="m", max_model_len=4096)] if kl else []),
        *workers,
    ]  # fmt: skip
    shape = shape_of_config(PUBLISHED[model], who=model)
    return Asked(
        train=train,
        workers=tuple(tables),
        num_ranks=2,
        model=shape,
        worker_models=dict.fromkeys(range(len(tables)), shape),
        longest=dict.fromkeys(range(len(tables)), 4096),
        fleet=fleet_of(devices) if devices else Fleet((), CPU, num_cores=2),
        host_bytes=0 if devices else 64 << 30,
    )


def with_train(run: Asked, **options) -> Asked:
    return replace(run, train=run.train.but(**options))


def work(run: Asked, *, mean=400.0):
    """The work of any split of it, by the peaks of its devices."""
    lengths = assumed_lengths(
        longest=run.train.sampling.max_generation_tokens, prompt=100, mean=mean
    )
    return work_of(run, RateSources(), lengths)
