"""Models that are filled by slices of their files, and what is said of those that cannot be."""

import json

import pytest
import torch
import torch.distributed as dist
from oracle import tiny_model
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from async_grpo.model.loading import load_sharded
from async_grpo.training.fsdp import shard
from async_grpo.util.errors import UnfitModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path):
    tiny_model(tied=True).save_pretrained(tmp_path)
    return tmp_path


def load(folder, mesh):
    return load_sharded(
        str(folder), attention="packed", dtype=torch.float32, device=CPU,
        shard=lambda policy: shard(policy, mesh),
    )  # fmt: skip


def rewrite(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def test_no_value_is_read_by_way_of_a_whole_model(folder, mesh, monkeypatch):
    monkeypatch.setattr("async_grpo.model.loading._load_whole", None)
    policy = load(folder, mesh)
    expected = dict(tiny_model(tied=True).named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name])


def test_names_that_transformers_converts_are_read_by_it_and_the_cost_is_told(folder, mesh, caplog):
    rewrite(folder, lambda own: {name.removeprefix("model."): t for name, t in own.items()})
    policy = load(folder, mesh)
    for got, want in zip(policy.parameters(), tiny_model(tied=True).parameters(), strict=True):
        assert torch.equal(got.full_tensor(), want)
    assert "first model.embed_tokens.weight): each rank reads the whole model" in caplog.text


def test_a_tensor_of_another_shape_is_refused(folder, mesh):
    rewrite(folder, lambda own: own | {"model.norm.weight": torch.ones(7)})
    with pytest.raises(UnfitModel, match=r"model.norm.weight .* it has \[7\]"):
        load(folder, mesh)


def test_a_head_stored_beside_the_embedding_it_is_tied_to_must_equal_it(folder, mesh):
    def with_head(extra):
        return lambda own: own | {"lm_head.weight": own["model.embed_tokens.weight"] + extra}

    rewrite(folder, with_head(0.0))
    load(folder, mesh)
    rewrite(folder, with_head(1e-3))
    with pytest.raises(UnfitModel, match=r"ties lm_head.weight to model.embed_tokens.weight"):
        load(folder, mesh)


def test_a_file_that_the_index_names_must_be_there(folder, mesh):
    names = load_file(folder / "model.safetensors")
    places = dict.fromkeys(names, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UnfitModel, match=r"first model-00002-of-00002\.safetensors: finish"):
        load(folder, mesh)
