"""Names on a hub become folders here, once a node; what cannot be had is told in one sentence.

The hub is one of this machine, which sends what the real one would.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from stand_in_hub import COMMIT, StandInHub

from async_grpo.model.hub import local_folder
from async_grpo.model.model_folder import check_model_folder
from async_grpo.util.errors import ConfigError, UnfitModel

TINY = Path(__file__).parents[2] / "sample-data" / "tiny-countdown"
NAME = "Qwen/Qwen2-1.5B-Instruct"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    model = shutil.copytree(TINY, models / "model")
    (model / "original").mkdir()
    (model / "original" / "model.safetensors").write_text("again")
    for name in ("pytorch_model.bin", "model.gguf", "consolidated.safetensors"):
        (model / name).write_text("the weights in another format")
    (models / "bin-only").mkdir()
    (models / "bin-only" / "config.json").write_text("{}")
    (models / "bin-only" / "pytorch_model.bin").write_text("")
    known = {NAME: model, "plain": model, "mistral/gated": model, "a/bin": models / "bin-only"}
    with StandInHub(known, gated={"mistral/gated"}) as server:
        yield server


@pytest.fixture
def online(hub, tmp_path, monkeypatch):
    """The hub, and an empty cache."""
    use(hub.endpoint, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return hub


def use(endpoint, monkeypatch, *, offline=False):
    files = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)


@pytest.mark.parametrize("name", [NAME, "plain"])
@pytest.mark.parametrize("revision", ["", "main", COMMIT])
def test_a_name_becomes_the_folder_of_a_snapshot_that_can_be_trained(name, revision, online):
    folder = Path(local_folder(name, revision=revision))
    assert folder.name == COMMIT
    needed = {file.name for file in TINY.iterdir()} - {"README.md"}
    assert {file.name for file in folder.iterdir()} == needed  # nothing twice, and no other format
    assert check_model_folder(str(folder)).tokenizer_hash == check_model_folder(TINY).tokenizer_hash


def test_what_exists_here_is_a_folder_and_no_hub_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir(parents=True)
    assert local_folder(NAME) == NAME
    with pytest.raises(ConfigError, match=f"--model-revision goes with .* the path {NAME}"):
        local_folder(NAME, revision="main")


@pytest.mark.parametrize("path", ["./foo", "/x/y", "foo/bar/baz", "~/foo", "runs/latest/", "../m"])
def test_a_mistyped_path_is_no_name_of_a_hub(path, online):
    assert local_folder(path) == path


@pytest.mark.parametrize(
    ("name", "revision", "sentence"),
    [
        ("foo/bar", "", "'foo/bar' is neither: correct it, or set HF_TOKEN when the model is priv"),
        (NAME, "v9", f"--model-revision must be a branch, tag or commit of {NAME}, got 'v9'"),
        ("mistral/gated", "", "only to those who accepted its terms: .* set HF_TOKEN"),
        ("a/bin", "", "must hold .*safetensors, a/bin does not"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(name, revision, sentence, online):
    with pytest.raises((UnfitModel, ConfigError), match=sentence):
        local_folder(name, revision=revision)


@pytest.mark.parametrize("offline", [True, False], ids=["HF_HUB_OFFLINE", "nobody answers"])
def test_without_a_hub_the_cache_serves_and_a_stranger_is_refused(offline, online, monkeypatch):
    folder = local_folder(NAME)
    use("http://127.0.0.1:9", monkeypatch, offline=offline)
    assert local_folder(NAME) == local_folder(NAME, revision="main") == folder
    reason = "HF_HUB_OFFLINE is set" if offline else "Connection refused"
    with pytest.raises(UnfitModel, match=f"'foo/bar' is no folder here, nor .*{reason}"):
        local_folder("foo/bar")


def test_a_snapshot_that_was_broken_off_is_not_taken_for_the_model(online, monkeypatch):
    folder = local_folder(NAME)
    Path(folder, "model.safetensors").unlink()
    use("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(UnfitModel, match="nor a model in Hugging Face's cache"):
        local_folder(NAME)


def test_several_processes_of_a_node_download_once(hub, tmp_path):
    code = f"from async_grpo.model.hub import local_folder; print(local_folder({NAME!r}))"
    env = os.environ | {
        "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    hub.downloads.clear()
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(3)]
    folders = {process.communicate(timeout=60)[0] for process in processes}
    assert folders == {
        f"{tmp_path}/hub/models--Qwen--Qwen2-1.5B-Instruct/snapshots/{COMMIT}\n".encode()
    }
    assert hub.downloads == {file.name: 1 for file in TINY.iterdir() if file.suffix != ".md"}


def test_a_hub_that_says_nothing_is_not_waited_for(monkeypatch, online):
    import socket

    from async_grpo.util import deadlines

    monkeypatch.setattr(deadlines, "HUB_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
        begun = time.monotonic()
        with pytest.raises(UnfitModel, match="timed out"):
            local_folder("foo/bar")
        assert time.monotonic() - begun < 5
