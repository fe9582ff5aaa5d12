"""A system on which bubblewrap can confine nothing: by its answer alone, and really."""

from pathlib import Path

from async_grpo.verification.confinement import find_bwrap

REFUSAL = "bwrap: No permissions to create new namespace"


def refusing_bwrap(folder):
    """A folder to begin PATH with, whose bwrap fails as in a container without namespaces."""
    program = Path(folder, "bwrap")
    program.write_text(f"#!/bin/sh\necho '{REFUSAL}' >&2\nexit 1\n")
    program.chmod(0o755)
    return str(folder)


def container():
    """Words before a command: root, without a right, where no user makes a namespace."""
    return (
        *(find_bwrap(), "--dev-bind", "/", "/", "--unshare-user", "--uid", "0", "--gid", "0"),
        *("--disable-userns", "--cap-drop", "ALL", "--die-with-parent"),
    )
