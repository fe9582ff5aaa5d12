"""The token that Ray's processes show each other: where this one's lies, and whether it is sent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from async_grpo.util.errors import ClusterError

VARIABLE = "RAY_AUTH_TOKEN"
AS_ON_HEAD = "put there what `ray get-auth-token` prints on the head's machine"


def settle_authentication() -> None:
    """Make Ray send this machine's token if there is one; by default Ray does not look for it.

    A cluster that wants none takes a client with a token too.
    """
    if "RAY_AUTH_MODE" in os.environ or not _has_token():
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    if "ray" in sys.modules:  # it read the variable when it was imported
        from ray._private.authentication.authentication_token_setup import _enable_token_auth

        _enable_token_auth()


def check_token() -> None:
    """Raise `ClusterError` when the user wants a token to be sent, and there is none."""
    if _mode() == "token" and not _has_token():
        raise ClusterError(
            f"RAY_AUTH_MODE=token needs a token, but there is none in {_place()}: {AS_ON_HEAD}, or "
            "unset RAY_AUTH_MODE"
        )


def refused(address: str) -> ClusterError:
    """The error for a cluster that has refused this process's token, or the lack of one."""
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
