from types import SimpleNamespace

import pytest
import torch

from async_grpo import cluster
from async_grpo.checkpoint import references
from async_grpo.weight_sync import links

BUCKETS = {
    "first": [("a", torch.arange(6.0)), ("b", torch.ones(2, 3))],
    "second": [("c", torch.zeros(4))],
}


@pytest.mark.parametrize(("max_bytes", "num_files"), [(1 << 30, 1), (25, 3)])
def test_a_moved_reference_comes_back_whole_however_it_is_cut(
    max_bytes, num_files, monkeypatch, tmp_path
):
    monkeypatch.setattr(references, "SHARD_BYTES", max_bytes)
    monkeypatch.setattr(cluster, "wait", lambda data, **_: data)
    monkeypatch.setattr(links, "unpack_bucket", lambda bucket, data: iter(BUCKETS[data]))
    buckets = tuple(SimpleNamespace(data=name) for name in BUCKETS)
    snapshot = SimpleNamespace(version=SimpleNamespace(batches=12), buckets=buckets)
    references.save_references([snapshot], tmp_path)
    assert len(list(tmp_path.iterdir())) == num_files
    found = dict(references.read_reference(tmp_path, 12))
    expected = dict(BUCKETS["first"] + BUCKETS["second"])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not list(references.read_reference(tmp_path, 1))
