"""A checkpoint that is not as it was written."""

import hashlib
import json

import pytest
from checkpoints_on_disk import REFERENCE, SHARD, newest, save
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.checkpoint.reader import read_checkpoint
from async_grpo.util.errors import CheckpointError


def rewrite_manifest(path, **changes):
    """As somebody would who knows the format."""
    text = json.dumps(json.loads((path / "manifest.json").read_text()) | changes).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "COMMITTED").write_text(hashlib.sha256(text).hexdigest())


def damage(change):
    return pytest.param(change, id=change.__name__)


def flipped(path):
    (path / SHARD).write_bytes(b"weighty")


def short(path):
    (path / SHARD).write_bytes(b"weigh")


def missing(path):
    (path / REFERENCE).unlink()


def no_manifest(path):
    (path / "manifest.json").unlink()


def no_marker(path):
    (path / "COMMITTED").unlink()
    (path / "manifest.json").unlink()


def foreign_file(path):
    (path / "more.safetensors").write_bytes(b"")


def foreign_folder(path):
    (path / "more").mkdir()


def linked_shard(path):
    (path / SHARD).rename(path.parent / "elsewhere")
    (path / SHARD).symlink_to(path.parent / "elsewhere")


def linked_folder(path):
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def later_format(path):
    rewrite_manifest(path, format=2, release="9.1.0")


def leads_outside(path):
    rewrite_manifest(path, files={"../batch_1/" + SHARD: "0" * 64})


def edited_manifest(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"batches": 2', '"batches": 3'))


REASONS = {
    flipped: f"batch_2/{SHARD} must have the sha256 {hashlib.sha256(b'weights').hexdigest()}, "
    f"which was written, got {hashlib.sha256(b'weighty').hexdigest()}",
    short: f"batch_2/{SHARD} must have the sha256",
    missing: f"batch_2 must hold {REFERENCE}, which is missing",
    no_marker: "batch_2 must hold manifest.json, without it is no checkpoint",
    no_manifest: "batch_2 must hold manifest.json, without it is no checkpoint",
    foreign_file: "batch_2 must hold only the files of its manifest.json, got more.safetensors",
    foreign_folder: "batch_2/more must be a file, is a folder or a link",
    linked_shard: f"batch_2/{SHARD} must be a file, is a folder or a link",
    linked_folder: "batch_2 must be a folder, is a file or a link",
    later_format: "reads, got 2: resume with async-grpo '9.1.0', which wrote it",
    leads_outside: f"batch_2 must hold ../batch_1/{SHARD}, which is missing",
    edited_manifest: "batch_2/manifest.json must have the sha256",
}


@pytest.mark.parametrize("change", map(damage, REASONS))
def test_a_checkpoint_that_is_not_as_written_is_passed_over_with_the_reason(tmp_path, change):
    good = save(tmp_path, 1)
    path = save(tmp_path, 2)
    change(path)
    found = newest(tmp_path)
    assert found.path == good and found.manifest.batches == 1
    [(passed, reason)] = found.passed_over
    assert passed == path and REASONS[change] in reason
    again = save(tmp_path, 2)
    assert newest(tmp_path).path == again
    assert good.exists()


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "..", "../x", "a/../../x", "a/./x", "a//x", "a/", "./x", "a\\..\\x", "a\0",
     "manifest.json", "COMMITTED"],
)  # fmt: skip
def test_nothing_is_read_outside_of_the_checkpoint_whatever_its_manifest_names(tmp_path, name):
    path = save(tmp_path, 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    rewrite_manifest(path, files=files | {name: "0" * 64})
    with pytest.raises(CheckpointError, match=r"batch_1 must hold .*, which is missing"):
        read_checkpoint(path)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_no_flipped_bit_goes_unseen(tmp_path_factory, data):
    path = save(tmp_path_factory.mktemp("flips"), 1)
    file = path / data.draw(st.sampled_from([SHARD, REFERENCE, "manifest.json"]))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="must have the sha256"):
        read_checkpoint(path)
