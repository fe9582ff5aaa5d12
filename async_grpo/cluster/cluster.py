"""Ray: connect, find and name actors, place them, and never wait without a deadline."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from async_grpo.cluster.head import find_head, refusal
from async_grpo.util import deadlines
from async_grpo.util.errors import (
    AsyncGrpoError,
    ClusterError,
    DeadlineError,
    ProcessLostError,
    SnapshotLostError,
    WeightSyncError,
    WorkerError,
)
from async_grpo.util.together import in_background

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from async_grpo.types import WeightsBucket, WeightsDelta

logger = logging.getLogger(__name__)
T = TypeVar("T")
Exported = tuple[object, ...]  # of an object reference: bytes and texts
Places = tuple[tuple[str, int], ...]  # host and port of each

CONTROLLER = "controller"


def connect(address: str, *, namespace: str, timeout_s: float = deadlines.CLUSTER_JOINED_S) -> None:
    """Join a running cluster as a driver, unless this process has.

    Raises `ClusterError` within seconds when there is none, or when it refuses this machine, and
    after `timeout_s` when it does not let this process in.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # An answer that nobody waits for any more may be an error, as when the run has ended.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        return
    found = find_head(address)
    # It may hang in C++. In a thread it leaves SIGTERM to the command, and says so.
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    initialise = partial(
        ray.init,
        address=found,
        namespace=namespace,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )
    try:
        in_background(initialise, name="join-cluster").result(timeout_s)
    except TimeoutError:
        raise ClusterError(
            f"the Ray cluster at {found} must let this process in within {timeout_s:g} s, it did "
            "not: this machine is busy, is no node of it, or the cluster listens on loopback alone "
            "(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 for who joins it)"
        ) from None
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        text = " ".join(str(error).split())[:300]
        raise ClusterError(
            f"cannot connect to the Ray cluster at {found}, of which this machine must be a node "
            f"(`ray start --address {found}`): {text}"
        ) from error
    logger.info("joined the Ray cluster at %s", found)
    # Ray prints its own long account of every worker that dies; our one sentence stands for it.
    ray._private.worker._worker_logs_enabled = False


def head_address() -> str:
    """The host:port of the head of the cluster that this process has joined."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def endpoints() -> Places:
    """Where the cluster's head and this node's raylet listen, for `has_ended`."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    host, _, port = head_address().rpartition(":")
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    return (host, int(port)), (node["NodeManagerAddress"], int(node["NodeManagerPort"]))


def metrics_url() -> str:
    """Where this node serves metrics to Prometheus; empty if it does not."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    port = node.get("MetricsExportPort")
    return f"http://{node['NodeManagerAddress']}:{port}/metrics" if port else ""


def has_ended(places: Places) -> bool:
    """Whether the cluster, or its part on this machine, listens no more."""
    return any(refusal(host, port) for host, port in places)


def find_actor(name: str) -> Any | None:
    """The handle of a named actor of this namespace, or None if there is none."""
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def driver_of(actor: ActorHandle) -> str:
    """The driver that an actor ends with, for people: its process and its machine."""
    from ray._private import state

    row = state.actors(actor._actor_id.hex())
    for job in state.jobs():
        if job["JobID"] == row.get("JobID"):
            return f"process {job['DriverPid']} on {job['DriverIPAddress']}"
    return "of an unknown process"


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """A scheduling strategy that keeps an actor on the caller's node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def on_head_node() -> NodeAffinitySchedulingStrategy:
    """A scheduling strategy that prefers the cluster's head; any other node if it has no room."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    head = next(n for n in ray.nodes() if "node:__internal_head__" in n["Resources"])
    return NodeAffinitySchedulingStrategy(node_id=head["NodeID"], soft=True)


def resources_here() -> dict[str, float]:
    """What this node has in all, such as {"CPU": 8.0}."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return next(dict(node["Resources"]) for node in ray.nodes() if node["NodeID"] == here)


def free_here() -> dict[str, float]:
    """What of it no actor holds at this moment."""
    import ray
    from ray._private.state import available_resources_per_node

    node = ray.get_runtime_context().get_node_id()
    return dict(available_resources_per_node().get(node, {}))


@dataclass(frozen=True, slots=True)
class Room:
    """A node of the cluster, and what of it no actor holds."""

    node_id: str
    host: str
    free: Mapping[str, float]


def nodes_with_room() -> list[Room]:
    """Every node that lives, the caller's first."""
    import ray
    from ray._private.state import available_resources_per_node

    here, free = ray.get_runtime_context().get_node_id(), available_resources_per_node()
    found = [
        Room(node["NodeID"], node["NodeManagerAddress"], dict(free.get(node["NodeID"], {})))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda room: (room.node_id != here, room.host, room.node_id))


def holders_here(resource: str) -> str:
    """The actors that have some of a resource of this node; empty when none has.

    Such as "LogprobWorker (process 7, GPU 0)".
    """
    import ray
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import ActorTableData

    here = bytes.fromhex(ray.get_runtime_context().get_node_id())
    found = []
    for row in state._connect_and_get_accessor().get_actor_table(None, "ALIVE"):
        actor = ActorTableData.FromString(row)
        if actor.node_id == here and actor.required_resources.get(resource):
            ids = [each.index for m in actor.resource_mapping for each in m.resource_ids
                   if m.name == resource]  # fmt: skip
            number = f", {resource} {', '.join(map(str, ids))}" if ids else ""
            found.append(f"{actor.class_name} (process {actor.pid}{number})")
    return ", ".join(sorted(found))


def object_store_bytes() -> int:
    """Of all nodes together."""
    import ray

    return int(ray.cluster_resources().get("object_store_memory", 0))


def is_here(node_id: str) -> bool:
    """Whether that is the node that this process is on."""
    import ray

    return str(ray.get_runtime_context().get_node_id()) == node_id


def process_of(handle: ActorHandle) -> int:
    """The process id of an actor, dead or alive; 0 as long as Ray has found no place for it."""
    from ray._private import state

    return int(state.actors(handle._actor_id.hex()).get("Pid", 0))


def logs_folder() -> str:
    """Where Ray keeps what the actors of this node have said."""
    import ray

    return str(ray._private.worker._global_node.get_logs_dir_path())


def is_ready(reference: Awaitable[object]) -> bool:
    """Whether `wait` would return, or raise, at once."""
    import ray

    return bool(ray.wait([reference], timeout=0)[0])


def wait(reference: Awaitable[T], *, timeout_s: float, who: str) -> T:
    """The value of an object reference; raises `DeadlineError` naming `who`.

    An error of this package that the other side raised is raised as it was, without Ray's wrapping;
    a dead actor becomes a `WorkerError` that names `who`.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise DeadlineError(f"{who} did not answer within {timeout_s:g} s") from None
    except RayError as error:
        raise _translated(error, who) from None


def fetch(references: Sequence[Awaitable[T]], *, timeout_s: float, owner: str) -> list[T | None]:
    """The values of objects; None for what is lost with its node, or does not come in time.

    Raises `ProcessLostError` naming the `owner` that has ended, and with it all that it owned.
    """
    import ray
    from ray.exceptions import GetTimeoutError, ObjectLostError, OwnerDiedError

    if not references:
        return []
    wanted = list(references)
    ready = set(ray.wait(wanted, num_returns=len(wanted), timeout=timeout_s)[0])
    values: list[T | None] = []
    for reference in wanted:
        try:
            here = reference in ready
            values.append(ray.get(reference, timeout=deadlines.STATUS_S) if here else None)
        except OwnerDiedError:
            raise ProcessLostError(f"{owner} has ended, and what it owned is lost") from None
        except (GetTimeoutError, ObjectLostError):
            values.append(None)
    return values


async def call(reference: Awaitable[T], *, timeout_s: float | None, who: str) -> T:
    """As `wait`, for coroutines; None: whoever calls has another way to know that none comes."""
    from ray.exceptions import RayError

    try:
        async with asyncio.timeout(timeout_s):
            return await reference
    except RayError as error:  # first: the other side's timeout is a TimeoutError too
        raise _translated(error, who) from None
    except TimeoutError:
        raise DeadlineError(f"{who} did not answer within {timeout_s:g} s") from None


async def work(reference: Awaitable[T], *, timeout_s: float | None, who: str) -> T:
    """As `call`, for what costs the other side work: it stops when its answer is given up."""
    import ray

    try:
        return await call(reference, timeout_s=timeout_s, who=who)
    except (asyncio.CancelledError, DeadlineError):
        if isinstance(reference, ray.ObjectRef):
            ray.cancel(reference)
        raise


def put_bytes(data: NDArray[np.uint8]) -> ObjectRef:
    """Copy bytes into this node's object store; they live until this process lets go of them.

    Raises `WeightSyncError` when there is no room for them.
    """
    import ray
    from ray.exceptions import RayError

    try:
        return ray.put(data)
    except RayError as error:
        raise WeightSyncError(
            f"the object store of this node did not take {data.nbytes} bytes of weights "
            f"({type(error).__name__}): start Ray with a larger --object-store-memory, and a "
            "container with a larger --shm-size"
        ) from error


def export_reference(reference: ObjectRef) -> Exported:
    """A reference for another process, which `import_reference` turns into one again.

    Unlike one that travels in a call it keeps nothing alive: the bytes end with the reference of
    the process that has put them. (Ray's pickler would keep them as long as that process.)
    """
    from ray._private.worker import global_worker

    _, owner, status = global_worker.core_worker.serialize_object_ref(reference)
    parts = (reference.binary(), reference.call_site(), owner, status)
    return *parts, reference.tensor_transport()


def import_reference(exported: Exported) -> ObjectRef:
    """The inverse of `export_reference`."""
    from ray._private.serialization import _object_ref_deserializer

    return _object_ref_deserializer(*exported)


async def fetch_bytes(
    bucket: WeightsBucket | WeightsDelta, *, timeout_s: float = deadlines.BUCKET_FETCH_S
) -> NDArray[np.uint8]:
    """The [size_bytes] bytes of a bucket of weights, or of what changed in it.

    Raises `SnapshotLostError` when the trainer has ended, `WeightSyncError` when they do not come.
    """
    from ray.exceptions import ObjectFetchTimedOutError, ObjectLostError, RayError

    try:
        return await asyncio.wait_for(_as_coroutine(bucket.data), timeout_s)
    except TimeoutError:
        raise WeightSyncError(
            f"a bucket of {bucket.size_bytes} bytes of weights did not arrive within "
            f"{timeout_s:g} s: look at the network and the load of the trainer's machine"
        ) from None
    except RayError as error:
        # A trainer rank owns the bytes: they are lost with it, or let go for newer ones.
        lost = isinstance(error, ObjectLostError) and not isinstance(
            error, ObjectFetchTimedOutError
        )
        raise (SnapshotLostError if lost else WeightSyncError)(
            f"a bucket of weights is lost, its sender has probably died: {type(error).__name__}"
        ) from None


async def _as_coroutine(reference: Awaitable[T]) -> T:
    return await reference


def _translated(error: Exception, who: str) -> Exception:
    """What a Ray error means in this package."""
    from ray.exceptions import (
        ActorUnavailableError,
        OutOfMemoryError,
        RayActorError,
        RayTaskError,
    )

    if isinstance(error, ActorUnavailableError):
        return ProcessLostError(
            f"{who} cannot be reached: its process, its node or the Ray cluster has ended"
        )
    if isinstance(error, OutOfMemoryError):  # Ray's account of its kill; its remedies follow
        return ProcessLostError(f"{who} died: {str(error).splitlines()[0]}")
    if isinstance(error, RayActorError):
        reason = _last_line(error).partition(" Some common causes")[0]  # for an essay on memory
        return ProcessLostError(f"{who} died: {reason}")
    if not isinstance(error, RayTaskError):
        return ClusterError(f"{who} cannot be reached: {_last_line(error)}")
    cause = error.cause
    if isinstance(cause, AsyncGrpoError):
        return cause
    return WorkerError(f"{who} failed: {type(cause or error).__name__}: {_last_line(error)}")


def _last_line(error: Exception) -> str:
    """What a remote traceback ends with; an error of this package speaks for itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    return re.sub(r"^async_grpo\.errors\.\w+: ", "", last)
