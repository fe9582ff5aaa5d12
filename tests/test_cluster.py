import asyncio

import pytest
from ray.exceptions import ActorUnavailableError, OutOfMemoryError

from async_grpo.cluster import handles
from async_grpo.util.errors import ProcessLostError

FACTS = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
    "10.0.0.1, ID: 85d4) was 22.85GB used / 23.54GB limit (0.97)"
)
ESSAY = f"""{FACTS}
OOM kill reason: Memory usage 3059613696B exceeded threshold of 505530016B
Top 10 memory users: PID MEM(GB) COMMAND
27978 0.36 python
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io."""


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OutOfMemoryError(ESSAY), f"the batcher died: {FACTS}"),
        (
            ActorUnavailableError("IOError: The actor was restarted", None),
            "the batcher cannot be reached: its process, its node or the Ray cluster has ended",
        ),
    ],
)
def test_a_process_that_ray_has_killed_or_lost_is_told_in_one_sentence(error, sentence):
    async def fails():
        raise error

    with pytest.raises(ProcessLostError) as lost:
        asyncio.run(handles.call(fails(), timeout_s=1.0, who="the batcher"))
    assert str(lost.value) == sentence
