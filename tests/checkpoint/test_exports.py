"""What becomes of exports on a disk that refuses them."""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from adapted_models import adapted
from full_disk import no_file_beyond
from learners import make_learner
from oracle import tiny_model
from safetensors.torch import load_file
from test_loading import save_tokenizer

from async_grpo.checkpoint.export import Exports, export_finished
from async_grpo.model.loading import probe_pairs, scores_alone
from async_grpo.types import EndOfStep
from async_grpo.util.errors import CheckpointError

END = EndOfStep(0, 0, True, num_samples=6, num_tokens=9)
ALONE = SimpleNamespace(share=lambda work: work(), on_main=lambda work: work())


@pytest.fixture
def learner(tmp_path):
    tiny_model(tied=True).save_pretrained(tmp_path / "m")
    return make_learner(tmp_path / "run", model_name_or_path=str(tmp_path / "m"))


def test_a_full_disk_costs_the_export_and_leaves_no_part_of_it(learner, tmp_path, caplog):
    exports = Exports(learner, doing=lambda words: None)
    exports.count(END)
    with no_file_beyond(10_000):
        exports.export()
    (told,) = caplog.messages
    assert told.startswith(f"the export to {tmp_path}/run/hf_format/samples_6 FAILED, the run goes")
    assert "File too large" in told
    assert list((tmp_path / "run" / "hf_format").iterdir()) == []
    exports.export()
    assert (tmp_path / "run" / "hf_format" / "samples_6" / "model.safetensors").exists()
    exports.check_last(is_saved=False)


def test_a_model_that_is_nowhere_at_the_end_is_an_error(learner, caplog):
    exports = Exports(learner, doing=lambda words: None)
    exports.check_last(is_saved=False)  # nothing was refused
    with no_file_beyond(10_000):
        exports.export()
    with pytest.raises(CheckpointError, match=r"refused the trained model \(.*File too large"):
        exports.check_last(is_saved=False)
    exports.check_last(is_saved=True)
    assert "give the same command again to export it" in caplog.messages[-1]


def test_a_finished_run_is_exported_when_its_export_is_missing(learner, tmp_path):
    builds = []

    def restored():
        builds.append(learner)
        return learner

    finished = str(tmp_path / "run"), ALONE, {"samples": 6, "last_export": 6}
    export_finished(*finished, restored=restored)
    stored = load_file(tmp_path / "run" / "hf_format" / "samples_6" / "model.safetensors")
    name = "model.norm.weight"
    assert torch.equal(stored[name], learner.policy.model.get_parameter(name).detach())
    export_finished(*finished, restored=restored)
    assert len(builds) == 1
    shutil.rmtree(tmp_path / "run" / "hf_format")
    export_finished(*finished, restored=restored)
    assert len(builds) == 2


@pytest.mark.parametrize("merged", [False, True])
def test_a_run_of_an_adapter_exports_it_with_a_card_whose_code_loads_it(
    merged, tmp_path, monkeypatch
):
    source, run = tmp_path / "m", tmp_path / "run"
    tiny_model(tied=True).save_pretrained(source)
    save_tokenizer(source)
    options = {"model_name_or_path": str(source), "lora_rank": 4, "export_merged": merged}
    learner = make_learner(run, **options)
    learner.policy = adapted(tiny_model(tied=True), lora_rank=4)
    export_finished(str(run), ALONE, {"samples": 6, "last_export": 6}, restored=lambda: learner)
    folder = run / "hf_format" / "samples_6"
    assert (folder / "model.safetensors").exists() is merged
    assert (folder / "adapter_model.safetensors").exists() is not merged
    card = (folder / "README.md").read_text()
    assert f"library_name: {'transformers' if merged else 'peft'}\n" in card
    assert str(tmp_path) not in card
    code = re.search(r"```python\n(.*?)```", card, re.S)[1].replace('"."', f'"{folder}"')
    monkeypatch.chdir(tmp_path)  # where the base is called `m`
    exec(code, found := {})
    pairs = probe_pairs(64)
    with torch.no_grad():
        off_by = scores_alone(found["model"], pairs) - scores_alone(learner.policy.model, pairs)
    assert off_by.abs().max() <= 5e-6
    assert found["tokenizer"]("w3")["input_ids"] == [3]
