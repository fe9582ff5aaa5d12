"""Lives beside rank 0 and does nothing else, so that its end tells the controller of the trainer's.

consumes:     nothing
produces:     nothing
waits for:    the end of the trainer's process, with which Ray ends it
unblocked by: –

Ray starts one that dies by itself again, which accuses nobody: a run ends when its witness is gone
and rank 0 no longer says that it lives.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from async_grpo.cluster import cluster

if TYPE_CHECKING:
    from async_grpo.controller.handles import WitnessHandle


class Witness:
    """Whoever has begun a run owns one."""

    async def until_death(self) -> None:
        """Never return: whoever waits for it hears of the process' death as Ray's error."""
        await asyncio.Event().wait()


def start_witness() -> WitnessHandle:
    """The handle of a new witness, owned by this process and on its node."""
    import ray

    options = ray.remote(Witness).options(
        num_cpus=0,
        max_restarts=-1,
        enable_task_events=False,
        scheduling_strategy=cluster.on_this_node(),
    )
    return options.remote()
