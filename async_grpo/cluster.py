"""Ray: connect, find and name actors, place them, and never wait without a deadline."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from async_grpo.errors import AsyncGrpoError, ClusterError, DeadlineError, WorkerError

logger = logging.getLogger(__name__)
T = TypeVar("T")

VERIFIER_POOL = "verifier-pool"
BATCHER = "experience-batcher"
NO_CLUSTER = (
    "start one with `ray start --head --include-dashboard=false`, or name a running one with "
    "--ray-address host:port"
)


def registry_name(role: str) -> str:
    """The Ray name of a role's registry."""
    return f"registry-{role}"


def settle_authentication() -> None:
    """Use Ray's token when this machine has one; Ray itself looks for it only when told to."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    token_file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if os.environ.get("RAY_AUTH_TOKEN") or token_file.is_file():
        os.environ["RAY_AUTH_MODE"] = "token"


def connect(address: str, *, namespace: str) -> None:
    """Join a running cluster as a driver.

    Raises `ClusterError` within seconds when there is none, or when it refuses this machine.
    """
    settle_authentication()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    if address != "auto":
        _check_listening(address)
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ClusterError(_connection_problem(address, error)) from error


def _connection_problem(address: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "uthenticat" in text or "auth token" in text.lower():
        return (
            f"the Ray cluster at {address} wants another authentication token: copy its "
            "~/.ray/auth_token here, or set RAY_AUTH_TOKEN"
        )
    if "Could not find any running Ray instance" in text:
        return f"no Ray cluster runs on this machine: {NO_CLUSTER}"
    return f"cannot connect to a Ray cluster at {address}: {text[:300]}: {NO_CLUSTER}"


def _check_listening(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"--ray-address must be host:port or auto, got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address} ({error.strerror or error}): {NO_CLUSTER}"
        ) from error


def find_actor(name: str) -> Any | None:
    """The handle of a named actor of this namespace, or None when nobody has made it."""
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def on_this_node() -> Any:
    """A scheduling strategy that keeps an actor on the caller's node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def wait(reference: Any, *, timeout_s: float, who: str) -> Any:
    """The value of an object reference; raises `DeadlineError` naming `who`.

    An error of this package that the other side raised is raised as it was, without Ray's wrapping;
    a dead actor becomes a `WorkerError` that names `who`.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise DeadlineError(f"{who} did not answer within {timeout_s:g} s") from None
    except RayTaskError as error:
        raise _unwrapped(error, who) from None
    except RayActorError as error:
        raise WorkerError(f"{who} died: {_last_line(error)}") from None


async def call(reference: Awaitable[T], *, timeout_s: float, who: str) -> T:
    """As `wait`, for coroutines."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return await asyncio.wait_for(_as_coroutine(reference), timeout_s)
    except TimeoutError:
        raise DeadlineError(f"{who} did not answer within {timeout_s:g} s") from None
    except RayTaskError as error:
        raise _unwrapped(error, who) from None
    except RayActorError as error:
        raise WorkerError(f"{who} died: {_last_line(error)}") from None


async def _as_coroutine(reference: Awaitable[T]) -> T:
    return await reference


def _unwrapped(error: Any, who: str) -> Exception:
    cause = getattr(error, "cause", None)
    if isinstance(cause, AsyncGrpoError):
        return cause
    return WorkerError(f"{who} failed: {type(cause or error).__name__}: {_last_line(error)}")


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
