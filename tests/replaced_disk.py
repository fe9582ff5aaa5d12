"""Another disk in place of the operations on files that a checkpoint is made of."""

from contextlib import contextmanager

from async_grpo.checkpoint import disk

OPERATIONS = (
    "make_tree", "remove", "remove_tree", "write", "sync", "rename", "entries", "read", "sha256",
)  # fmt: skip


class Disk:
    """The system's own: a test overrides what its disk does otherwise."""

    make_tree = staticmethod(disk.make_tree)
    remove = staticmethod(disk.remove)
    remove_tree = staticmethod(disk.remove_tree)
    write = staticmethod(disk.write)
    sync = staticmethod(disk.sync)
    rename = staticmethod(disk.rename)
    entries = staticmethod(disk.entries)
    read = staticmethod(disk.read)
    sha256 = staticmethod(disk.sha256)


@contextmanager
def used(other):
    """Within, checkpoints are written to and read from `other`."""
    originals = {name: getattr(disk, name) for name in OPERATIONS}
    try:
        for name in OPERATIONS:
            setattr(disk, name, getattr(other, name))
        yield
    finally:
        for name, original in originals.items():
            setattr(disk, name, original)
