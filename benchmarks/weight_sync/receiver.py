"""What takes published weights in place of an engine's worker.

An actor's class must stand in a module that Ray can import: ranks that are spawned run their script
as `__mp_main__`, which no other process has.
"""

from async_grpo.rollout.weights_update import StagedWeights, fetch_bytes, fetch_into
from async_grpo.types import WeightsSnapshot


class Receiver:
    """A worker as far as it matters here: what it fetches is checked and laid out for an engine."""

    def __init__(self) -> None:
        self._staging = StagedWeights()

    async def stage(self, snapshot: WeightsSnapshot) -> None:
        await fetch_into(self._staging, self._staging.begin(snapshot), fetch_bytes)
        self._staging.end()
