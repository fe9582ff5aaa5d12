import numpy as np
import pytest
import torch
from fake_cluster import FakeCluster

from async_grpo.checkpoint import tensors
from async_grpo.types import WeightsVersion
from async_grpo.weight_sync.buckets import pack
from async_grpo.weight_sync.publisher import Publisher

TENSORS = {"a": torch.arange(6.0), "b": torch.ones(2, 3), "c": torch.zeros(4)}


@pytest.mark.parametrize(("max_bytes", "num_files"), [(1 << 30, 1), (25, 3)])
def test_a_moved_reference_comes_back_whole_however_it_is_cut(
    max_bytes, num_files, monkeypatch, tmp_path
):
    monkeypatch.setattr(tensors, "FILE_BYTES", max_bytes)
    version = WeightsVersion(0, 12)
    snapshot = pack(TENSORS.items(), put=np.copy, version=version, bucket_bytes=32)
    served = Publisher(FakeCluster()).read(snapshot)
    tensors.save_reference(served, tmp_path, batches=snapshot.version.batches)
    assert len(list(tmp_path.iterdir())) == num_files
    found = dict(tensors.read_reference(tmp_path, 12))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert not list(tensors.read_reference(tmp_path, 1))
