"""What a resumed run must find as its checkpoint left it."""

from types import SimpleNamespace

import pytest
from scripted_run import make_config

from async_grpo.checkpoint.resume import Start
from async_grpo.errors import CheckpointError
from async_grpo.run import preparation
from async_grpo.run.preparation import hash_contents


@pytest.mark.parametrize("what", ["algorithm", "environment"])
def test_a_file_of_the_user_s_that_was_edited_is_refused_naming_it_and_both_hashes(
    what, tmp_path, monkeypatch
):
    monkeypatch.setattr(preparation, "hash_model", lambda path: "of the model")
    facts = SimpleNamespace(tokenizer_hash="of the tokenizer")
    path = tmp_path / "mine.py"
    config = make_config(**{what: f"{path}:Mine"})

    def hashes(text, saved=None):
        path.write_text(text)
        manifest = SimpleNamespace(hashes=saved)
        start = Start(tmp_path / "checkpoint", manifest) if saved else Start()
        return hash_contents(config, facts, (), start=start).result()

    saved = hashes("1")
    assert hashes("1", saved) == saved
    edited = hashes("2")[what]
    said = f"the {what} of {path}:Mine must be .*{saved[what]}, got {edited}: give the same one"
    with pytest.raises(CheckpointError, match=said):
        hashes("2", saved)
