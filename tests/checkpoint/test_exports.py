"""What becomes of exports on a disk that refuses them."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from full_disk import no_file_beyond
from learners import make_learner
from oracle import tiny_model
from safetensors.torch import load_file

from async_grpo.checkpoint.export import Exports, export_finished
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
