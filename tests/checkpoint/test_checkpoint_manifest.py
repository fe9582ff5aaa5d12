import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo import __version__
from async_grpo.checkpoint.manifest import Manifest, check_names, from_json, to_json
from async_grpo.errors import CheckpointError

words = st.text('aé"\n\0\u2028😀', max_size=5)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(words, plain, max_size=4)


def content(**changes):
    manifest = Manifest(batches=1, world_size=1, config={}, hashes={"model": "m"}, state={})
    return json.loads(to_json(manifest)) | changes


@given(st.integers(0), st.integers(1), objects, objects)
@settings(max_examples=30, deadline=None)
def test_what_is_written_is_read(batches, world_size, config, state):
    manifest = Manifest(
        batches=batches, world_size=world_size, config=config, hashes={"data": "d"}, state=state,
        files={"a/b": "0" * 64}, saved_at_ns=7,
    )  # fmt: skip
    assert from_json(to_json(manifest)) == manifest


def test_values_that_json_lacks_and_broken_text_survive_too():
    state = {"x": [float("inf"), -float("inf")], "text": "\ud800\0"}
    manifest = Manifest(batches=1, world_size=1, config={}, hashes={}, state=state)
    assert from_json(to_json(manifest)).state == state


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("batches", -1, "batches in manifest.json must be a whole number"),
        ("batches", True, "whole number"),
        ("batches", 1.0, "whole number"),
        ("world_size", 0, "world_size in manifest.json must be a whole number"),
        ("state", [], "state in manifest.json must be an object"),
        ("hashes", {"model": 1}, "hashes.model in manifest.json must be a string"),
        ("files", {"a": "0" * 63}, "files.a in manifest.json must be a sha256"),
        ("files", {"a": "G" * 64}, "files.a in manifest.json must be a sha256"),
        ("extra", 1, "missing or unknown: 'extra'"),
        ("format", "1", "must have format 1"),
        ("format", True, "must have format 1"),
        ("format", 2, f"which async-grpo {__version__} reads, got 2: resume with async-grpo"),
    ],
)
def test_a_manifest_that_is_not_as_written_is_refused_by_name(name, value, rule):
    with pytest.raises(CheckpointError, match=rule):
        from_json(json.dumps(content(**{name: value})).encode())


def test_a_manifest_that_lacks_something_is_refused_by_name():
    lacking = content()
    del lacking["state"]
    with pytest.raises(CheckpointError, match="missing or unknown: 'state'"):
        from_json(json.dumps(lacking).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"null"])
def test_anything_but_an_object_in_json_is_refused(text):
    with pytest.raises(CheckpointError, match=r"manifest\.json must"):
        from_json(text)


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "..", "../x", "a/../../x", "a/./x", "a//x", "a/", "./x", "a\\..\\x", "a\0",
     "manifest.json", "COMMITTED"],
)  # fmt: skip
def test_a_name_that_leads_outside_the_checkpoint_is_refused(name):
    with pytest.raises(CheckpointError, match="must name files within the checkpoint"):
        check_names([name])
    with pytest.raises(CheckpointError, match="must name files within the checkpoint"):
        from_json(json.dumps(content(files={name: "0" * 64})).encode())


def test_names_in_folders_are_fine():
    check_names(["a", "reference/model-00001-of-00002.safetensors", "..a", "a..b/.c"])
