"""The actors that a slot passes through, each of which may be made anew at any moment."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from async_grpo import cluster
from async_grpo.bundles import Bundles
from async_grpo.errors import ClusterError, ProcessLostError

logger = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0


@dataclass(frozen=True, slots=True)
class Services:
    """Handles of the Ray actors of a run, as they were when the run began."""

    generation: Any  # registry of generation workers
    verifiers: Any  # the verifier pool
    reference: Any | None  # registry of logprob workers; None when the KL coefficient is 0


def renewed(services: Services) -> Services:
    """With the handles of this moment; an actor that has gone keeps its old one until it is back.

    Reference workers are part of a run from its beginning, or not at all.
    """
    reference = services.reference
    return Services(
        generation=_newest(cluster.registry_name("generation"), services.generation),
        verifiers=_newest(cluster.VERIFIER_POOL, services.verifiers),
        reference=reference and _newest(cluster.registry_name("logprob"), reference),
    )


def _newest(name: str, handle: Any) -> Any:
    return cluster.find_actor(name) or handle


class Service:
    """A named actor; when its process is lost, whoever gets its name is asked instead."""

    def __init__(self, who: str, handle: Any, *, name: str, is_bundled: bool = False) -> None:
        """`is_bundled`: the actor takes many calls as one, see `bundles`."""
        self.who = who
        self.num_retries = 0  # calls that met a lost process and were made again
        self._handle = handle
        self._name = name
        self._bundles = Bundles(handle) if is_bundled else None

    @classmethod
    def registry(cls, role: str, handle: Any) -> Service:
        return cls(
            f"the {role} registry", handle, name=cluster.registry_name(role), is_bundled=True
        )

    async def call(self, method: str, *arguments: Any, timeout_s: float, patience_s: float) -> Any:
        """The answer, within `timeout_s` of the try that got one.

        Raises what the actor raised, `DeadlineError` when it is silent, and `ClusterError` when
        nobody has taken a lost actor's place for `patience_s`. An actor that is lost may have done
        what it was asked: only ask what may be asked twice.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        for pause_s in pauses():
            try:
                return await self.try_call(method, *arguments, timeout_s=timeout_s)
            except ProcessLostError as error:
                if clock() + pause_s - started > patience_s:
                    raise ClusterError(
                        f"{self.who} was lost, and nothing took its place within {patience_s:g} s "
                        f"({error}): look at the dispatchers, which make it anew"
                    ) from None
                logger.warning("%s is lost, trying again in %g s: %s", self.who, pause_s, error)
            self.num_retries += 1
            await asyncio.sleep(pause_s)
            self._renew(_newest(self._name, self._handle))
        raise AssertionError("pauses have no end")

    async def try_call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """The answer of one try; raises `ProcessLostError` too."""
        if self._bundles is not None:
            call = self._bundles.call(method, *arguments)
        else:
            call = getattr(self._handle, method).remote(*arguments)
        return await cluster.call(call, timeout_s=timeout_s, who=self.who)

    def _renew(self, handle: Any) -> None:
        if handle is not self._handle:
            self._handle = handle
            self._bundles = self._bundles and Bundles(handle)


def pauses() -> Iterator[float]:
    """Seconds between tries: 0.25, 0.5, 1, ... 5, 5, 5."""
    for number in itertools.count():
        yield min(FIRST_PAUSE_S * 2 ** min(number, 10), LONGEST_PAUSE_S)
