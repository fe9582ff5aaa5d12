"""Ray: joining a cluster, finding and placing actors, and waiting with deadlines."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray._private import state
from ray._private.serialization import _object_ref_deserializer
from ray._private.state import available_resources_per_node
from ray._private.worker import global_worker
from ray.core.generated.gcs_pb2 import ActorTableData
from ray.exceptions import GetTimeoutError, ObjectLostError, OwnerDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_grpo.cluster.handles import translated
from async_grpo.cluster.head import find_head, refusal
from async_grpo.util import deadlines
from async_grpo.util.errors import ClusterError, DeadlineError, ProcessLostError, WeightSyncError
from async_grpo.util.waiting import in_background

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)
T = TypeVar("T")
Exported = tuple[object, ...]  # of an object reference: bytes and texts
Places = tuple[tuple[str, int], ...]  # host and port of each


@dataclass(frozen=True, slots=True)
class Room:
    """A node of the cluster with its free resources."""

    node_id: str
    host: str
    free: Mapping[str, float]


class Cluster:
    """The Ray cluster that this process has joined.

    Code that asks other processes takes one as an argument, so that tests can pass a fake.
    """

    @classmethod
    def join(
        cls, address: str, *, namespace: str, timeout_s: float = deadlines.CLUSTER_JOINED_S
    ) -> Cluster:
        """Join a running cluster as a driver, unless this process has.

        Raises `ClusterError` within seconds when there is none, or when it refuses this machine,
        and after `timeout_s` when joining takes longer.
        """
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # An answer that is no longer awaited may be an error, as when the run has ended.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        if ray.is_initialized():
            return cls()
        found = find_head(address)
        # `ray.init` may hang in C++; in a thread the command still gets SIGTERM and a timeout.
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
                f"the Ray cluster at {found} must let this process in within {timeout_s:g} s, it "
                "did not: this machine is busy, is no node of it, or the cluster listens on "
                "loopback alone (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 for who joins it)"
            ) from None
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            text = " ".join(str(error).split())[:300]
            raise ClusterError(
                f"cannot connect to the Ray cluster at {found}, of which this machine must be a "
                f"node (`ray start --address {found}`): {text}"
            ) from error
        logger.info("joined the Ray cluster at %s", found)
        # Ray prints a long report of every worker that dies; ours is one sentence.
        ray._private.worker._worker_logs_enabled = False
        return cls()

    def head_address(self) -> str:
        """The host:port of the head of the cluster that this process has joined."""
        return str(ray.get_runtime_context().gcs_address)

    def endpoints(self) -> Places:
        """Where the cluster's head and this node's raylet listen, for `has_ended`."""
        host, _, port = self.head_address().rpartition(":")
        node = _node_here()
        return (host, int(port)), (node["NodeManagerAddress"], int(node["NodeManagerPort"]))

    @staticmethod
    def has_ended(places: Places) -> bool:
        """Whether the cluster's head, or the raylet of this machine, no longer listens."""
        return any(refusal(host, port) for host, port in places)

    def metrics_url(self) -> str:
        """Where this node serves metrics to Prometheus; empty if it does not."""
        node = _node_here()
        port = node.get("MetricsExportPort")
        return f"http://{node['NodeManagerAddress']}:{port}/metrics" if port else ""

    def find_actor(self, name: str) -> Any | None:
        """The handle of a named actor of this namespace, or None if there is none."""
        try:
            return ray.get_actor(name)
        except ValueError:
            return None

    def driver_of(self, actor: ActorHandle) -> str:
        """The driver whose end also ends an actor, for messages: its process and machine."""
        row = state.actors(actor._actor_id.hex())
        for job in state.jobs():
            if job["JobID"] == row.get("JobID"):
                return f"process {job['DriverPid']} on {job['DriverIPAddress']}"
        return "of an unknown process"

    def on_head_node(self) -> NodeAffinitySchedulingStrategy:
        """A scheduling strategy that prefers the head's node; any other if it has no room."""
        head = next(n for n in ray.nodes() if "node:__internal_head__" in n["Resources"])
        return NodeAffinitySchedulingStrategy(node_id=head["NodeID"], soft=True)

    def actor(self, actor_class: type, *, node_id: str = "", **options: Any) -> Any:
        """An actor class with options, to call `.remote(...)` on: on `node_id`, else on this node.

        It takes no CPU. Ray's log of its calls, which would grow with the run, is off.
        """
        node_id = node_id or ray.get_runtime_context().get_node_id()
        place = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        usual = {"num_cpus": 0, "enable_task_events": False, "scheduling_strategy": place}
        return ray.remote(actor_class).options(**usual | options)

    def resources_here(self) -> dict[str, float]:
        """All resources of this node, such as {"CPU": 8.0}."""
        return dict(_node_here()["Resources"])

    def free_here(self) -> dict[str, float]:
        """The free resources of this node."""
        node = ray.get_runtime_context().get_node_id()
        return dict(available_resources_per_node().get(node, {}))

    def nodes_with_room(self) -> list[Room]:
        """Every living node, the caller's first."""
        here, free = ray.get_runtime_context().get_node_id(), available_resources_per_node()
        found = [
            Room(node["NodeID"], node["NodeManagerAddress"], dict(free.get(node["NodeID"], {})))
            for node in ray.nodes()
            if node["Alive"]
        ]
        return sorted(found, key=lambda room: (room.node_id != here, room.host, room.node_id))

    def holders_here(self, resource: str) -> str:
        """The actors that hold a resource of this node, for messages; empty where none does.

        For example "LogprobWorker (process 7, GPU 0)".
        """
        here = bytes.fromhex(ray.get_runtime_context().get_node_id())
        found = []
        for row in state.state._connect_and_get_accessor().get_actor_table(None, "ALIVE"):
            actor = ActorTableData.FromString(row)
            if actor.node_id == here and actor.required_resources.get(resource):
                ids = [each.index for m in actor.resource_mapping for each in m.resource_ids
                       if m.name == resource]  # fmt: skip
                number = f", {resource} {', '.join(map(str, ids))}" if ids else ""
                found.append(f"{actor.class_name} (process {actor.pid}{number})")
        return ", ".join(sorted(found))

    def object_store_bytes(self) -> int:
        """Size of the object stores of all nodes together, in bytes."""
        return int(ray.cluster_resources().get("object_store_memory", 0))

    def end(self, handle: ActorHandle) -> None:
        """End an actor at once, whatever it does."""
        ray.kill(handle)

    def is_here(self, node_id: str) -> bool:
        """Whether `node_id` is the node of this process."""
        return str(ray.get_runtime_context().get_node_id()) == node_id

    def process_of(self, handle: ActorHandle) -> int:
        """The process id of an actor, dead or alive; 0 while Ray has not placed it."""
        return int(state.actors(handle._actor_id.hex()).get("Pid", 0))

    def logs_folder(self) -> str:
        """The folder of the logs of this node's actors."""
        return str(ray._private.worker._global_node.get_logs_dir_path())

    def is_ready(self, reference: Awaitable[object], *, within_s: float = 0.0) -> bool:
        """Whether `wait` would return or raise at once; waits up to `within_s` for that."""
        return bool(ray.wait([reference], timeout=within_s)[0])

    def wait(self, reference: Awaitable[T], *, timeout_s: float, who: str) -> T:
        """The value of an object reference; raises `DeadlineError` naming `who`.

        An error of this package raised by the other side is raised unchanged, without Ray's
        wrapping; a dead actor becomes a `WorkerError` that names `who`.
        """
        try:
            return ray.get(reference, timeout=timeout_s)
        except GetTimeoutError:
            raise DeadlineError(f"{who} did not answer within {timeout_s:g} s") from None
        except RayError as error:
            raise translated(error, who) from None

    def wait_for_all(self, references: Sequence[Awaitable[object]], *, timeout_s: float) -> None:
        """Return when all calls have returned or failed, or after `timeout_s`."""
        if references:
            ray.wait(list(references), num_returns=len(references), timeout=timeout_s)

    def fetch(
        self, references: Sequence[Awaitable[T]], *, timeout_s: float, owner: str
    ) -> list[T | None]:
        """The values of objects; None for one that was lost with its node, or is late.

        Raises `ProcessLostError` naming the `owner` when it has ended, which loses its objects.
        """
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

    def put_bytes(self, data: NDArray[np.uint8]) -> ObjectRef:
        """Copy bytes into this node's object store, where this process keeps them alive.

        Raises `WeightSyncError` when they do not fit.
        """
        try:
            return ray.put(data)
        except RayError as error:
            raise WeightSyncError(
                f"the object store of this node did not take {data.nbytes} bytes of weights "
                f"({type(error).__name__}): start Ray with a larger --object-store-memory, and a "
                "container with a larger --shm-size"
            ) from error

    def export_reference(self, reference: ObjectRef) -> Exported:
        """Serialise a reference for another process, which calls `import_reference`.

        Unlike a reference passed in a call it keeps nothing alive: the bytes are freed with the
        reference of the process that put them. (Ray's pickler would pin them in that process.)
        """
        _, owner, status = global_worker.core_worker.serialize_object_ref(reference)
        parts = (reference.binary(), reference.call_site(), owner, status)
        return *parts, reference.tensor_transport()

    def import_reference(self, exported: Exported) -> ObjectRef:
        """The inverse of `export_reference`."""
        return _object_ref_deserializer(*exported)


def _node_here() -> dict[str, Any]:
    here = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == here)
