import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo import __version__
from async_grpo.checkpoint.reader import Manifest, from_json, to_json
from async_grpo.util.errors import CheckpointError

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
        files={"a": "0" * 64}, saved_at_ns=7,
    )  # fmt: skip
    assert from_json(to_json(manifest)) == manifest


def test_values_that_json_lacks_and_broken_text_survive_too():
    state = {"x": [float("inf"), -float("inf")], "text": "\ud800\0"}
    manifest = Manifest(batches=1, world_size=1, config={}, hashes={}, state=state)
    assert from_json(to_json(manifest)).state == state


@pytest.mark.parametrize("written", ["1", 2, None])
def test_a_manifest_of_another_format_names_the_release_that_wrote_it(written):
    rule = f"must have format 1, which async-grpo {__version__} reads, got {written!r}: resume with"
    with pytest.raises(CheckpointError, match=f"{rule} async-grpo '9.1.0', which wrote it"):
        from_json(json.dumps(content(format=written, release="9.1.0")).encode())


def test_a_manifest_that_lacks_something_is_refused_by_name():
    lacking = content()
    del lacking["state"]
    with pytest.raises(CheckpointError, match=r"must be one of a checkpoint: KeyError\('state'\)"):
        from_json(json.dumps(lacking).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"null"])
def test_anything_but_an_object_in_json_is_refused(text):
    with pytest.raises(CheckpointError, match=r"manifest\.json must"):
        from_json(text)
