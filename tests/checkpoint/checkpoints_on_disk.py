"""Small checkpoints in a folder of a test."""

from replaced_disk import Disk, used

from async_grpo.checkpoint.folder import CheckpointFolder
from async_grpo.checkpoint.reader import Manifest

SHARD = "model-00001.safetensors"
REFERENCE = "reference_1_00001.safetensors"


def save(root, batches, *, keep=2, content=b"weights", disk=None, spared=()):
    folder = CheckpointFolder(root, keep=keep, spared=lambda: frozenset(spared))
    with used(disk or Disk()):
        temporary = folder.begin(batches)
        (temporary / SHARD).write_bytes(content)
        (temporary / REFERENCE).write_bytes(b"reference")
        return folder.commit(temporary, a_manifest(batches))


def a_manifest(batches):
    return Manifest(
        batches=batches, world_size=2, config={"seed": 0}, hashes={"model": "m"}, state={"rng": [1]}
    )


def newest(root):
    return CheckpointFolder(root, keep=2).newest()


def names(root):
    return sorted(path.name for path in root.iterdir())
