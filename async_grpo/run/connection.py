"""How others join a run by its folder: rank 0 leaves there where its cluster is, for its user."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from async_grpo.cluster import cluster
from async_grpo.run.folder_lock import is_given_back
from async_grpo.telemetry.jsonl import write_json_atomic
from async_grpo.util.errors import ClusterError

CONNECTION_FILE = "connection.json"
LAUNCH_LOGS = "ASYNC_GRPO_LAUNCH_LOGS"  # where `launch` has what the run's workers say
# Of the environment, what a client of the cluster must have as the run has it; none is a secret.
VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")


def leave_connection(folder: Path) -> None:
    """Write the file, of the cluster that this process has joined."""
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if token := variables.get("RAY_AUTH_TOKEN_PATH"):
        variables["RAY_AUTH_TOKEN_PATH"] = os.path.abspath(token)
    connection = {
        "ray_address": cluster.head_address(),
        "metrics_url": cluster.metrics_url(),
        "variables": variables,
    }
    write_json_atomic(folder / CONNECTION_FILE, connection, mode=0o600)


def way_to(folder: Path, *, by_options: str) -> str:
    """The address of the run's cluster, whose variables this process has from now on.

    To be asked before Ray is imported. `by_options`: the address of a run that has left no
    connection. Raises `ClusterError` where the run has ended, or the token is gone.
    """
    if is_given_back(folder):
        raise ClusterError(
            f"the run in {folder} must be training, it has ended, or has not begun yet: start it "
            f"again with `async-grpo launch {folder}/run.toml`, or with its own command"
        )
    try:
        left: dict[str, Any] = json.loads((folder / CONNECTION_FILE).read_text())
    except (OSError, ValueError):
        return by_options
    token = left["variables"].get("RAY_AUTH_TOKEN_PATH", "")
    if token and not os.access(token, os.R_OK):
        raise ClusterError(
            f"the token of the run's cluster must be in {token}, it cannot be read there: its "
            "cluster has ended, or is another machine's or another user's"
        )
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would go before the run's own
    os.environ.update(left["variables"])
    return str(left["ray_address"])
