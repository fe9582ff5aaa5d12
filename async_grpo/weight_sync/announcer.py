"""Announces weights to registries that may be restarted, and so forget them, at any moment.

consumes:     snapshots, in the order of their versions
produces:     registries that know the newest snapshot of their role
waits for:    the successor of a registry that is lost, up to the announcement's deadline
unblocked by: Ray or a dispatcher, which start it again
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from async_grpo import cluster
from async_grpo.errors import AsyncGrpoError, DeadlineError, ProcessLostError
from async_grpo.types import PublishReport, WeightsSnapshot
from async_grpo.weight_sync.transport import Transport

logger = logging.getLogger(__name__)
INTERVAL_S = 2.0
CALL_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 5.0  # a registry that hangs holds up nobody's end


class Announcer:
    """Knows what was announced to which life of each registry; looks after them from a thread.

    Its questions are also how a registry knows that the trainer lives.
    """

    def __init__(
        self,
        transport: Transport,
        registries: Mapping[str, Any],
        *,
        find: Callable[[str], Any] = cluster.find_actor,
    ) -> None:
        """`registries`: by role; `find` gives the handle of the actor that has a name now."""
        self._transport = transport
        self._registries = dict(registries)
        self._find = find
        self._newest: dict[str, WeightsSnapshot] = {}
        self._sessions: dict[str, int] = {}  # of the registry that was told of the newest
        self._announcing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="keep-announced", daemon=True)

    def start(self) -> None:
        """Look after the registries from now on."""
        self._thread.start()

    def close(self) -> None:
        """Let them forget; no thread of this asks Ray for anything any more.

        A thread that still asked when Ray is shut down would end the process, with exit code 1.
        """
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    @property
    def has_announced(self) -> bool:
        """Some weights have reached a registry."""
        return bool(self._sessions)

    def announce(
        self, snapshot: WeightsSnapshot, *, roles: tuple[str, ...], timeout_s: float
    ) -> dict[str, PublishReport]:
        """As `Transport.announce`, again from the beginning when a registry is lost meanwhile."""
        deadline = time.monotonic() + timeout_s
        with self._announcing:
            self._newest |= dict.fromkeys(roles, snapshot)
            while True:
                try:
                    return self._announce(snapshot, roles, deadline - time.monotonic())
                except ProcessLostError as error:
                    if time.monotonic() > deadline or self._closed.wait(INTERVAL_S / 4):
                        raise
                    logger.warning("weights %s are announced again: %s", snapshot.version, error)
                    self._find_again(roles)

    def look_after_once(self) -> None:
        """Announce the newest weights to whoever has forgotten them."""
        for role in tuple(self._newest):
            try:
                session = self._session(role)
                if not self._announcing.acquire(blocking=False):
                    continue  # it is being told: no session is on record before it has answered
                try:
                    if session != self._sessions.get(role):
                        self._announce_again(role)
                finally:
                    self._announcing.release()
            except DeadlineError as error:
                logger.warning("%s", error)  # asked again in a moment, as long as the run lasts
            except AsyncGrpoError:
                self._find_again((role,))

    def _announce_again(self, role: str) -> None:
        snapshot = self._newest[role]
        logger.warning(
            "the %s registry was restarted: weights %s are announced again", role, snapshot.version
        )
        self._announce(snapshot, (role,), CALL_TIMEOUT_S * 6)

    def _announce(
        self, snapshot: WeightsSnapshot, roles: tuple[str, ...], timeout_s: float
    ) -> dict[str, PublishReport]:
        # Before the announcement: should the registry be restarted in between, it is told twice.
        sessions = {role: self._session(role) for role in roles}
        reports = self._transport.announce(
            snapshot,
            registries={role: self._registries[role] for role in roles},
            timeout_s=max(timeout_s, CALL_TIMEOUT_S),
        )
        self._sessions |= sessions
        return reports

    def _session(self, role: str) -> int:
        call = self._registries[role].session.remote()
        session: int = cluster.wait(call, timeout_s=CALL_TIMEOUT_S, who=f"the {role} registry")
        return session

    def _find_again(self, roles: tuple[str, ...]) -> None:
        for role in roles:
            found = self._find(cluster.registry_name(role))
            self._registries[role] = found or self._registries[role]

    def _look_after(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            self.look_after_once()
