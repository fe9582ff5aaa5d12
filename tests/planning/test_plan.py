"""`async-grpo plan`: every example, ten thousand devices, and what it refuses."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from async_grpo.cli.main import main
from async_grpo.planning import cores, prediction, search
from async_grpo.planning.asked import Split, fleet_of
from async_grpo.planning.cores import Speed
from async_grpo.planning.page import settings, threads_in_words
from async_grpo.planning.rates import Rates

# A supervised run has no workers, and no plan.
EXAMPLES = sorted({*Path("examples").glob("*.toml")} - {Path("examples/from_nothing.toml")})
QWEN = "examples/qwen_7b.toml"
TINY = "sample-data/tiny-countdown"
DEVICES = {  # as their first lines say
    "qwen_7b": "8", "deepscaler": "8,8,8", "one_gpu": "1xL4", "lora_7b": "1xH100",
}  # fmt: skip
SHAPES = {  # made, or fetched
    "laptop_pretrained": "smollm2-135m", "lora_laptop": "smollm2-135m", "distil_two_teachers": TINY,
}  # fmt: skip


@pytest.fixture
def quick(monkeypatch):
    """A few batches of a small part of the run in each simulation, few splits."""
    monkeypatch.setattr(prediction, "SIMULATED_SAMPLES", 32)
    monkeypatch.setattr(prediction, "MEASURED", (1, 1))
    monkeypatch.setattr(prediction, "SHARES", 1)
    monkeypatch.setattr(search, "COARSE", (1.0,))
    monkeypatch.setattr(search, "FINE_ROUNDS", 0)


@pytest.fixture(autouse=True)
def these_cores(monkeypatch, tmp_path):
    """Nothing is measured, and nothing kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cores, "measured", lambda _threads: Speed(18e9, 8e9))


def plan(*words):
    return CliRunner().invoke(main, ["plan", *map(str, words)])


def content(*words):
    result = plan(*words, "--json")
    assert not result.exit_code, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("file", EXAMPLES, ids=[file.stem for file in EXAMPLES])
def test_every_example_is_planned(file, quick):
    machines = DEVICES.get(file.stem)
    shape = SHAPES.get(file.stem)
    words = ["--shape-of", shape] * bool(shape) + ["--devices", machines] * bool(machines)
    found = content(file, *words)
    assert found["best"]["step_s"] > 0 and found["bound"].endswith(".")
    assert all(line["formula"] for bill in found["bills"] for line in bill["lines"])
    assert [each["max_staleness"] for each in found["staleness"]] == [0, 1, 2, 4]
    shares = any("gpus_per" in line for line in found["settings"])
    assert shares == (file.stem in ("one_gpu", "lora_7b"))  # elsewhere whole devices are enough
    assert ("rates of [trainer]: measured on these cores" in found["assumptions"]) != bool(machines)


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        (12, (), "prompts of the data; mean output 22 tokens, prompts of 20"),
        (12, ("--prompt-tokens", 30), "mean output 22 tokens, prompts of 30"),
        (0, (), "mean output 22 tokens, prompts of 200"),
    ],
    ids=["data", "given", "none yet"],
)
def test_prompts_are_as_long_as_those_of_the_data(lines, options, said, tmp_path, quick):
    data = tmp_path / "questions.jsonl"
    question = json.dumps({"input": "use 1 2 3 to make 6\n", "answer": "1+2+3=6"}) + "\n"
    if lines:
        data.write_text(question * lines)
    found = content("examples/quickstart.toml", "--data-path", data, *options)
    [lengths] = [line for line in found["assumptions"] if line.startswith("lengths: ")]
    assert lengths.endswith(said)


def test_one_device_is_planned_with_the_shares_that_trainer_and_engine_have_of_it(quick):
    shared = content("examples/one_gpu.toml", "--devices", "1xL4")
    assert {"gpus_per_rank = 0.55", "gpus_per_worker = 0.35"} <= set(shared["settings"])
    assert all(bill["total"] <= bill["room"] for bill in shared["bills"][:2])
    assert any("share 1 x L4: each is slowed" in each for each in shared["assumptions"])


def test_what_is_recommended_stands_before_the_page_and_what_stands_unused_is_said(tmp_path, quick):
    file = tmp_path / "run.toml"
    text = Path(QWEN).read_text()
    file.write_text(text.replace("num_workers = 4", "tensor_parallel_size = 2"))
    told = plan(file, "--devices", "3,3", "--trust").stdout  # its prepare lies in another folder
    first, _, page = told.partition("\n\n")
    assert "1 engine of 2 devices, 3 trainer ranks" in first and "to set in the file:" in first
    assert "1 device of 6 would stand unused" in first and "memory, each:" in page


@pytest.mark.parametrize(("num_cores", "rest"), [(2, ""), (9, ": 2 would leave none idle")])
def test_the_threads_of_processes_on_cores_are_said(num_cores, rest):
    fleet = SimpleNamespace(num_cores=num_cores, threads=1)
    split = Split(engines=1, ranks=2, scorers=(1,))
    it = SimpleNamespace(best=SimpleNamespace(split=split), asked=SimpleNamespace(fleet=fleet))
    said = f"has 1 thread (OMP_NUM_THREADS) on {num_cores} cores{rest}"
    assert threads_in_words(it) == f"each of 4 processes that compute {said}"


def test_ranks_of_several_machines_are_set_by_the_machine():
    asked = SimpleNamespace(
        fleet=SimpleNamespace(of_a_node=8), on_cpu=False, is_shared=False, generation=0, scorers=(),
        workers=[SimpleNamespace(mode="generation", name="")],
    )  # fmt: skip
    best = SimpleNamespace(split=Split(engines=2, ranks=16, scorers=()), max_staleness=1)
    lines = settings(SimpleNamespace(best=best, asked=asked))
    assert lines[:4] == ("[launch]", "trainer_nodes = 2", "[train]", "nproc_per_node = 8")


@pytest.mark.slow
def test_ten_thousand_devices_are_planned_within_a_minute():
    began = time.process_time()
    result = plan(QWEN, "--devices", "10000", "--batch-size", "4096")
    assert time.process_time() - began < 60
    assert "one of 16 equal parts of the run was simulated" in result.stdout
    assert "10,000 x H100 on 1,250 machines" in result.stdout


def test_the_page_says_what_is_held_what_bounds_and_what_to_set(quick, monkeypatch):
    monkeypatch.setattr(prediction, "SIMULATED_SAMPLES", 128)  # enough that a part bounds the rest
    said = plan(QWEN, "--devices", "8xH200").stdout
    for part in (
        "keys and values: what is left, 2 L K e / D = 57344 B a token",
        "a gradient step:", "bounds the step:", "staleness  samples/s", "to set in the file:",
        "nproc_per_node = ", "what this rests on:", "rates of [engine]: of H200's peaks",
    ):  # fmt: skip
        assert part in said, part


def test_the_rates_that_are_shown_are_the_tables_that_are_read(tmp_path, quick):
    rates = content(QWEN, "--devices", "8")["rates"]
    file = tmp_path / "rates.toml"
    file.write_text("[trainer]\ncost_per_second = 1234\n[engine]\nstep_s = 0.02\n")
    found = content(QWEN, "--devices", "8", "--rates", file)
    assert found["rates"]["trainer"]["cost_per_second"] == 1234
    assert found["rates"]["engine"]["step_s"] == 0.02
    assert found["rates"]["trainer"].keys() == rates["trainer"].keys()
    assert f"rates of [trainer]: of H100's peaks and given in {file}" in found["assumptions"]
    assert set(rates) == set(Rates.__dataclass_fields__)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "8xH999"], "--devices must name a kind that is known (H100, "),
        (["--devices", "many"], "--devices must be a number of devices, those of each machine"),
        (["--devices", "0"], "--devices must be a number of devices, those of each machine"),
        (["--devices", "1"], "does not fit on 1 rank: a rank needs"),
        (["--devices", "2"], "--devices 2 are too few for 2 trainer rank(s)"),
        (["--devices", "2xA10G"], "does not fit on 2 ranks: a rank needs"),
        (["--rates", "/nowhere.toml"], "--rates /nowhere.toml cannot be read"),
        (["--from-run", "/nowhere"], "--from-run /nowhere has no run.toml"),
        (["--output-tokens", "9999"], "--output-tokens must be at most --max-generation-tokens"),
        (["--model-name-or-path", "acme/none"], "acme/none is no folder of this machine"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(words, said):
    result = plan(QWEN, *(["--devices", "8"] if "--devices" not in words else []), *words)
    assert result.exit_code == 1 and result.output.startswith("error: ")
    assert said in result.output and result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[trainers]\na = 1", "[trainers] is no rate, the nearest is trainer"),
        ("[trainer]\ncosts_per_second = 1", "the nearest is cost_per_second"),
        ("[engine]\nstep_s = -1", "must be a number that is not negative, got -1"),
    ],
)
def test_a_file_of_rates_with_a_mistake_is_refused(tmp_path, text, said):
    (tmp_path / "rates.toml").write_text(text)
    assert said in plan(QWEN, "--devices", "8", "--rates", tmp_path / "rates.toml").output


def test_a_machine_must_hold_what_lies_beside_its_devices(quick):
    words = [QWEN, "--devices", "8", "--max-tokens-per-gpu", 8192]
    assert not plan(*words, "--host-gib", 512).exit_code
    refused = plan(*words, "--host-gib", 128)
    assert refused.exit_code == 1
    assert "this machine has 128.0 GiB and the run needs about" in refused.stderr


def test_a_fleet_stands_in_machines_of_eight():
    assert fleet_of("20xL4").nodes == (8, 8, 4) and fleet_of("4,4").nodes == (4, 4)
    assert str(fleet_of("8xA100")) == "8 x A100"
