"""The teachers of a run, as its trainer meets them: their models, and their heads at the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from async_grpo.algorithms.base import Teacher
from async_grpo.cluster import cluster
from async_grpo.config.teaching import check_vocabulary
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.client import WHO, RunClient
from async_grpo.model.lm_head import Head, Rescaling
from async_grpo.types import WorkerInfo
from async_grpo.types.roles import teacher
from async_grpo.util import deadlines
from async_grpo.util.errors import DataError, WorkerError

if TYPE_CHECKING:
    from async_grpo.controller.handles import ControllerHandle
    from async_grpo.training.learner import Learner


def teachers_of(controller: ControllerHandle, config: TrainConfig) -> dict[str, WorkerInfo]:
    """{name: a worker that serves the teacher}; all workers of a name serve the same model.

    Raises `ConfigError` where a teacher has fewer tokens than it is asked for.
    """
    found: dict[str, WorkerInfo] = {}
    for name in config.teacher_names:
        call = controller.members.remote(teacher(name))
        members = cluster.wait(call, timeout_s=deadlines.ANSWER_S, who=WHO)
        if not members:
            raise WorkerError(
                f"the last worker of teacher {name} has ended while the run began: look at its "
                "dispatcher's terminal, and start both again"
            )
        check_vocabulary(config, members[0].vocab_size)
        found[name] = members[0]
    return found


def meet_teachers(
    learner: Learner, client: RunClient, widths: Callable[[], Mapping[str, int]]
) -> None:
    """Give a rank's learner what it must know of each teacher that its algorithm asks.

    `widths`: collective, by name its vocabulary's width. Where the algorithm needs the teachers'
    heads, which never change, every rank fetches them.
    """
    need, config = learner.algorithm.teacher_need, learner.config
    if need is None:
        return
    width_of, teachers = widths(), []
    for name in config.teacher_names:
        head = _head(client, name, learner.device, config) if need.fetches_heads else None
        teachers.append(Teacher(width_of[name], head))
    learner.step.head_terms += learner.algorithm.teacher_terms(teachers)


def _head(client: RunClient, name: str, device: torch.device, config: TrainConfig) -> Head:
    call = client.teacher_head(teacher(name))
    # The controller itself may wait so long for a teacher to be free.
    limit_s = config.stall_timeout_s + deadlines.ANSWER_S
    references = cluster.wait(call, timeout_s=limit_s, who=WHO)
    (arrays,) = cluster.fetch(references, timeout_s=deadlines.BUCKET_FETCH_S, owner=WHO)
    if arrays is None:
        raise DataError(f"the head of teacher {name} did not come: look at its worker's node")
    tensors = {key: torch.from_numpy(array.copy()) for key, array in arrays.items()}
    factor, softcap = tensors.pop("rescaling").tolist()
    on_device = {
        key: (t.view(torch.bfloat16) if t.dtype == torch.uint16 else t).to(device)
        for key, t in tensors.items()
    }
    return Head(**on_device, rescaling=Rescaling(factor, softcap or None))
