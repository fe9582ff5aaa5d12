"""Finds the head of a Ray cluster and the token for it; says within seconds why there is none."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from async_grpo.util import deadlines
from async_grpo.util.errors import ClusterError
from async_grpo.util.files import tokens_folder

logger = logging.getLogger(__name__)
NO_CLUSTER = (
    "start one with `ray start --head --include-dashboard=false`, or name a running one with "
    "--ray-address host:port"
)
VARIABLE = "RAY_AUTH_TOKEN"
# Of `ray start` and its clients: a worker's process may import for minutes before it joins Ray.
LATE_REGISTRATION = {"RAY_worker_register_timeout_seconds": f"{deadlines.IMPORTED_S:.0f}"}
AS_ON_HEAD = "put there what `ray get-auth-token` prints on the head's machine"


@contextlib.contextmanager
def private_cluster() -> Iterator[dict[str, str]]:
    """Variables for `ray start` and its clients: a new token, and loopback where Ray can.

    The token is in a private folder that is deleted on exit: Ray's own folder is writable by all
    users.
    """
    with tempfile.TemporaryDirectory(dir=tokens_folder(), ignore_cleanup_errors=True) as folder:
        token = Path(folder, "auth_token")
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        yield {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "GLOO_SOCKET_IFNAME": "lo",  # engines' and trainers' groups
            "NCCL_SOCKET_IFNAME": "lo",
            "VLLM_HOST_IP": "127.0.0.1",
            # Ray's default on other systems than Linux.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            **LATE_REGISTRATION,
        }


def find_head(address: str) -> str:
    """Like `locate`; warns of a cluster that asks for no token."""
    address = locate(address)
    if "RAY_AUTH_MODE" not in os.environ:
        logger.warning(
            "the Ray cluster at %s runs whatever anyone on its network sends to it, for it "
            "asks for no token: run `ray get-auth-token --generate` before `ray start`",
            address,
        )
    return address


def locate(address: str) -> str:
    """Resolve an address to the host:port of a Ray head that answers.

    Raises `ClusterError`, also when the cluster refuses this machine's token.
    """
    settle_authentication()
    check_token()
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    if address == "auto":
        address = _only_cluster_here()
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ClusterError(
            f"--ray-address (or RAY_ADDRESS) must be host:port or auto, got {address!r}: give what "
            "`ray start` printed"
        )
    problem = refusal(host, int(port))
    if problem:
        raise ClusterError(f"no Ray cluster answers at {address} ({problem}): {NO_CLUSTER}")
    _probe(address)
    return address


class ClusterResources(NamedTuple):
    """Resources of a cluster, as Ray counts them, over all living machines."""

    num_machines: int
    cpus: float
    free_cpus: float
    devices: float
    free_devices: float


def resources_of(address: str) -> ClusterResources:
    """Ask the head at host:port, without joining; raises `ClusterError` where it fails."""
    import grpc
    from ray._private.gcs_utils import create_gcs_channel
    from ray.core.generated.autoscaler_pb2 import (
        GetClusterResourceStateReply,
        GetClusterResourceStateRequest,
        NodeStatus,
    )

    with create_gcs_channel(address) as channel:
        ask = channel.unary_unary(
            "/ray.rpc.autoscaler.AutoscalerStateService/GetClusterResourceState",
            request_serializer=GetClusterResourceStateRequest.SerializeToString,
            response_deserializer=GetClusterResourceStateReply.FromString,
        )
        try:
            reply = ask(GetClusterResourceStateRequest(), timeout=deadlines.HEAD_PROBE_S)
        except grpc.RpcError as error:
            raise ClusterError(
                f"the Ray cluster at {address} does not say what it has ({error.code().name}): "
                "look at its head's log"
            ) from None
    nodes = [
        node
        for node in reply.cluster_resource_state.node_states
        if node.status != NodeStatus.Value("DEAD")
    ]

    def total(name: str, *, free: bool) -> float:
        of_each = (node.available_resources if free else node.total_resources for node in nodes)
        return sum(resources.get(name, 0.0) for resources in of_each)

    return ClusterResources(
        len(nodes),
        total("CPU", free=False),
        total("CPU", free=True),
        total("GPU", free=False),
        total("GPU", free=True),
    )


def _only_cluster_here() -> str:
    from ray._private.services import find_gcs_addresses

    addresses = sorted(find_gcs_addresses())
    if not addresses:
        raise ClusterError(f"no Ray cluster runs on this machine: {NO_CLUSTER}")
    if len(addresses) > 1:
        raise ClusterError(
            f"several Ray clusters run on this machine: choose one with --ray-address, of "
            f"{', '.join(addresses)}"
        )
    return str(addresses[0])


def refusal(host: str, port: int) -> str:
    """Why a port cannot be reached; empty when something listens."""
    try:
        socket.create_connection((host, port), timeout=deadlines.HEAD_PROBE_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _probe(address: str) -> None:
    """Call the head once, which fails at once where `ray.init` would retry for 20 s."""
    import grpc
    from ray._private.gcs_utils import create_gcs_channel

    with create_gcs_channel(address) as channel:
        get_cluster_id = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            get_cluster_id(b"", timeout=deadlines.HEAD_PROBE_S)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise refused(address) from None
            raise ClusterError(
                f"what answers at {address} is no Ray cluster ({error.code().name}): {NO_CLUSTER}"
            ) from None


def settle_authentication() -> None:
    """Make Ray send this machine's token if there is one, which it does not do by default.

    A cluster without tokens accepts a client that sends one.
    """
    if "RAY_AUTH_MODE" in os.environ or not _has_token():
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    if "ray" in sys.modules:  # it read the variable when it was imported
        from ray._private.authentication.authentication_token_setup import _enable_token_auth

        _enable_token_auth()


def check_token() -> None:
    """Raise `ClusterError` when RAY_AUTH_MODE asks for a token and there is none."""
    if _mode() == "token" and not _has_token():
        raise ClusterError(
            f"RAY_AUTH_MODE=token needs a token, but there is none in {_place()}: {AS_ON_HEAD}, or "
            "unset RAY_AUTH_MODE"
        )


def refused(address: str) -> ClusterError:
    """The error for a cluster that refused this process's token, or its absence."""
    if _mode() == "token":
        return ClusterError(
            f"the Ray cluster at {address} refuses the token of {_place()}: {AS_ON_HEAD}, or start "
            "the cluster again with this one"
        )
    wanted = f"the Ray cluster at {address} wants a token, and none was sent"
    if mode := _mode():
        return ClusterError(f"{wanted}, for RAY_AUTH_MODE is {mode!r}: unset it")
    return ClusterError(f"{wanted}, for there is none in {_place()}: {AS_ON_HEAD}")


def _mode() -> str:
    return os.environ.get("RAY_AUTH_MODE", "").lower()


def _place() -> str:
    """Where Ray looks for the token: in a variable, or in a file."""
    if os.environ.get(VARIABLE):
        return VARIABLE
    return os.environ.get("RAY_AUTH_TOKEN_PATH") or str(Path.home() / ".ray" / "auth_token")


def _has_token() -> bool:
    if (place := _place()) == VARIABLE:
        return True
    try:
        return bool(Path(place).read_text().strip())
    except OSError:
        return False
