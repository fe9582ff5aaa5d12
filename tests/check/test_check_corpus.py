# ruff: noqa: E501 - a case is a line
"""Broken runs and good ones: what `async-grpo check` says of each, in one line to be acted on.

A case changes a good run's file; what it says is looked for among the errors. In one process, as
importing what reads tokenizers takes most of a check's seconds.
"""

import json
import shutil
import socket
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from no_namespaces import REFUSAL, refusing_bwrap
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from async_grpo.check import checks, data_read, facts, worker_tables
from async_grpo.check.finding import Cost, Finding, Setup
from async_grpo.cli import launch_file
from async_grpo.cli.check import check, findings_of
from async_grpo.cli.local_run import planned
from async_grpo.cli.plan import plan
from async_grpo.cli.run_file import as_toml
from async_grpo.cli.run_processes import COMMAND, CheckBeside
from async_grpo.config.train_config import TrainConfig
from async_grpo.util.errors import ConfigError
from async_grpo.verification import confinement

REPOSITORY = Path(__file__).parents[2]
MODELS = REPOSITORY / "sample-data"
TINY = str(MODELS / "tiny-countdown")
CHAT = str(MODELS / "tiny-chat")
SERVICE = f"{REPOSITORY}/examples/calculator_service.py"
ASKS_SERVICE = {"train": {"max_tokens_per_gpu": 256, "environment": f"{SERVICE}:SecondTry"}}
QUESTION = {"input": "Use 2 9 8 to make 15:", "answer": "8-2+9", "nums": [2, 9, 8], "target": 15}
SLOW_S = 10.0


def questions(start=0, *, num=40, **columns):
    """Lines that differ."""
    return [
        QUESTION | {"input": f"Use 2 9 8 to make {n}:"} | columns for n in range(start, start + num)
    ]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """What a check imports takes seconds, once, that are no case's own."""
    findings_of(["--model-name-or-path", TINY, "--data-path", "none", "--objective", "sft"])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where a case runs: with data of 40 questions, and of two types."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write("questions.jsonl", *questions())
    write("sums.jsonl", *questions(40))
    types = [questions(0, num=20, dataset_type="sums"), questions(20, num=20, dataset_type="odes")]
    write("typed.jsonl", *[line for pair in zip(*types, strict=True) for line in pair])
    Path("run/folder").mkdir(parents=True)
    write("pairs.jsonl", *[{"input": f"{n}+1=", "completion": str(n + 1)} for n in range(40)])
    return tmp_path


def write(name, *lines):
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    Path(name).write_text(text)


def run_file(*, worker=(), train=(), launch=(), more_workers=(), data=(), text=""):
    """The good run's file with other values; None takes one out."""
    tables = {
        "launch": [{"num_cpus": 4}],
        "worker": [{"model_path": TINY, "max_model_len": 256, "reward_fns": "countdown"}],
        "train": [
            {"model_name_or_path": TINY, "data_path": "questions.jsonl", "max_tokens_per_gpu": 1024,
             "max_generation_tokens": 32, "output_dir": "run", "trackers": ""}
        ],
    }  # fmt: skip
    for name, change in (("launch", launch), ("worker", worker), ("train", train)):
        [table] = tables[name]
        table |= dict(change)
        tables[name] = [{key: value for key, value in table.items() if value is not None}]
    tables["worker"] += [{"model_path": TINY, **each} for each in more_workers]
    tables["data"] = list(data)
    Path("run.toml").write_text(as_toml(tables) + text)
    return "run.toml"


def look(*typed, tries_rewards=False, trusted=False, **changes):
    """The findings of a changed run that are neither ok nor wait, as lines."""
    file = run_file(**changes)
    started = time.process_time()
    findings = findings_of([file, *typed], tries_rewards=tries_rewards, trusted=trusted)
    assert time.process_time() - started < SLOW_S
    return [str(finding) for finding in findings if finding.level in ("warning", "error")]


def model(**changes):
    """A copy of the tiny model with another config; None takes an entry out."""
    shutil.copytree(TINY, "model")
    config = json.loads(Path("model/config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    Path("model/config.json").write_text(json.dumps(kept))
    return {"model_name_or_path": "model"}


# By name what is changed, and what is said.
OPTIONS = {
    "no toml": ({"text": "\n[train"}, "run.toml is no TOML"),
    "table": ({"text": "\n[trian]\nx = 1"}, "[trian] is no table of a run, the nearest is train"),
    "key": ({"train": {"learnign_rate": 1e-6}}, "learnign_rate is no option of `async-grpo train`"
            ", the nearest is learning_rate"),
    "TRL's": ({"train": {"num_generations": 8}}, "the nearest is samples_per_question"),
    "TRL's beta": ({"train": {"beta": 0.1}}, "the nearest is kl_coefficient"),
    "worker's key": ({"worker": {"max_seqs": 3}}, "[worker] max_seqs is no option of"),
    "type": ({"train": {"batch_size": "32"}}, "batch_size must be an integer, got '32'"),
    "no model": ({"train": {"model_name_or_path": None}}, "Missing option '--model-name-or-path'"),
    "no batch": ({"train": {"batch_size": 0}}, "--batch-size must be positive, got 0"),
    "rate": ({"train": {"learning_rate": 3.0}}, "--learning-rate must be at most 0.01"),
    "negative": ({"train": {"kl_coefficient": -1}}, "--kl-coefficient must not be negative"),
    "divisor": ({"train": {"train_minibatch_size": 5}}, "must divide --batch-size (32), got 5"),
    "no data": ({"train": {"data_path": None}}, "--data-path must be given, or --data for each"),
    "choice": ({"train": {"policy_loss": "ppo"}}, "policy_loss: 'ppo' is not one of clip, cispo"),
    "stall": ({"train": {"stall_timeout_s": 1}}, "--stall-timeout-s must be at least 10"),
    "schedule": ({"train": {"num_warmup_steps": 3, "warmup_ratio": 0.1}}, "--warmup-ratio"),
    "gateway": ({"train": {"gateway": "here"}}, "--gateway must be PORT or HOST:PORT"),
    "weight": ({"train": {"data_path": None},
                "data": [{"type": "a", "path": "sums.jsonl", "weight": 0}]},
               "--data of a must have a positive weight, got '0'"),
    "data key": ({"train": {"data_path": None},
                  "data": [{"type": "a", "path": "sums.jsonl", "wieght": 2}]},
                 "--data of a has an unknown key, got 'wieght'"),
    "two clusters": ({"train": {"ray_address": "10.0.0.1:6379"}},
                     "--ray-address of the trainer must be auto where workers start on a cluster"),
    "no such service": ({"more_workers": [{"mode": "nowhere.py:Mine"}]},
                        "--mode must be generation, logprob, teacher, verifier, environment, judge, reward, pack"),
    "no service": ({"more_workers": [{"mode": f"{SERVICE}:SecondTry"}]},
                   "SecondTry must say in its class how many requests a worker answers at a time, as"),
    "mode": ({"more_workers": [{"mode": "juge"}]}, "mode: 'juge' is not one of generation, logprob, "
             "teacher, verifier, environment, judge, reward, path/to/file.py:Name"),
    "teacher's name": ({"more_workers": [{"mode": "teacher"}]}, "--name must be given with --mode"),
}  # fmt: skip
RUNS = {
    "renderer": ({"train": {"renderer": "none such"}}, "error    renderer    --renderer"),
    "nothing learnt": ({"train": {"reward_coefficient": 0}}, "--reward-coefficient must be positi"),
    "no teacher": ({"train": {"gkd_coefficient": 1}}, "--gkd-coefficient needs a teacher, got 1"),
    "deterministic": ({"train": {"deterministic": True}}, "--max-staleness must be 0 with --determ"),
    "room": ({"train": {"max_generation_tokens": 1024}}, "--max-tokens-per-gpu must exceed"),
    "one sample": ({"train": {"samples_per_question": 1}}, "--samples-per-question must be at lea"),
    "clip": ({"train": {"clip_low": 1.5}}, "--clip-low must be at most 1, which is no bound below"),
    "hub": ({"train": {"push_to_hub": "a/b"}}, "error    hub         a/b is sent to https://huggingface.co, but HF_HUB_OFFLINE is set: unset"),
    "hub name": ({"train": {"push_to_hub": "a/b/c"}}, "error    hub         the model on a hub (--push-to-hub) must be NAME or ORGANISATION/NAME"),
    "shown": ({"train": {"hub_public": True}}, "--hub-public goes with --push-to-hub, got True: give that too"),
    "temperature": ({"train": {"temperature": 0.0}}, "--temperature must be positive for train"),
    "algorithm": ({"train": {"algorithm": "grop"}}, "error    algorithm   --algorithm must be"),
    "algorithm's file": ({"train": {"algorithm": "no.py:Mine"}}, "--algorithm"),
    "environment": ({"train": {"max_tokens_per_gpu": 256, "environment": "mine"}}, "--environment must be single_turn, agent:"),
    "no environment worker": (
        {"train": {"max_tokens_per_gpu": 256, "environment": f"{REPOSITORY}/examples/treasure_hunt.py:TreasureHunt"}},
        "run.toml needs a [[worker]] for the role environment",
    ),
    "no service worker": (
        {**ASKS_SERVICE, "more_workers": [{"mode": "environment"}]},
        "for the role service:calculator (" + SERVICE + ":SecondTry asks services['calculator']): add one",
    ),
    "service's name": (
        {**ASKS_SERVICE, "more_workers": [{"mode": "environment"}, {"mode": f"{SERVICE}:Calculator", "name": "abacus"}]},
        "correct the name, for it has service:abacus, or add one",
    ),
    "no reference": ({"train": {"kl_coefficient": 0.1}},
                     "needs a [[worker]] for the role reference (the KL coefficient is not 0): add"),
    "no teacher worker": ({"train": {"gkd_coefficient": 1, "teacher_for": ["x"]}},
                          "needs a [[worker]] for the role teacher:x"),
    "trackers": ({"train": {"trackers": "foo"}}, "error    trackers    --trackers must be among"),
    "output": ({"train": {"output_dir": "questions.jsonl/run"}}, "--output-dir must lie in a folder"),
    "dump": ({"train": {"dump_samples_filename": "folder/"}}, "--dump-samples-filename must not be a fo"),
    "resume": ({"train": {"resume": "nowhere"}}, "error    start       --resume must be auto, never"),
    "no such model": ({"train": {"model_name_or_path": "/no/model"}},
                      "error    model       the model must be a Hugging Face folder on this machine"),
    "worker's model": ({"worker": {"model_path": "/no/model"}}, "error    worker      the model must"),
    "worker's room": ({"worker": {"max_model_len": 40}}, "start it with a larger --max-model-len"),
    "worker's temperature": ({"worker": {"temperature": 0.5}}, "--temperature 1.0 must be that of "
                             "worker of [[worker]] generation, which serves 0.5"),
    "engine's option": ({"worker": {"engine_option": "max_num_batched_tokenss=3"}},
                        "is no option of vLLM, got max_num_batched_tokenss=3: the nearest is max_num_b"),
    "heads": ({"worker": {"tensor_parallel_size": 3}},
              "--tensor-parallel-size must divide the 2 attention heads of"),
    "environment's class": (
        {"train": {"max_tokens_per_gpu": 256, "environment": f"{REPOSITORY}/examples/treasure_hunt.py:Hunt"}},
        "treasure_hunt.py:Hunt must be a class that its file defines",
    ),
    "picture": ({"text": '\n[plot]\nvariable = ["avg_rewrd"]'},
                "warning  plot        [plot] variable avg_rewrd is no metric of every run, the nearest"
                " is avg_reward"),
    "nccl": ({"train": {"weight_transport": "nccl"}}, "--weight-transport nccl needs an NVIDIA dev"),
    "no such data": ({"train": {"data_path": "qestions.jsonl"}}, "must be an existing file or folder,"
                     " got 'qestions.jsonl'"),
    "no such held-out data": ({"train": {"eval_data_path": "no.jsonl"}}, "got 'no.jsonl': check it"),
    "mapping": ({"train": {"column_mapping": "input=question"}}, "column "
                "'question': expected what --column-mapping names"),
    "bad mapping": ({"train": {"column_mapping": "input"}}, "--column-mapping must hold our=yours"),
    "long prompt": ({"train": {"max_tokens_per_gpu": 40}}, "column 'input': expected a prompt of at"),
    "top-k": ({"train": {"gkd_coefficient": 1, "teacher_for": ["x"], "gkd_top_k": 500},
               "more_workers": [{"mode": "teacher", "name": "x"}]},
              "--gkd-top-k must not exceed the 128 tokens of the vocabulary"),
    "address": ({"launch": {"ray_address": "here"}}, "error    cluster     --ray-address (or RAY_ADD"),
    "nobody there": ({"launch": {"ray_address": "127.0.0.1:1"}}, "no Ray cluster answers at 127.0.0.1"),
    "type without teacher": (
        {"train": {"data_path": "typed.jsonl", "gkd_coefficient": 1, "teacher_for": ["sums=x"]},
         "more_workers": [{"mode": "teacher", "name": "x"}]},
        "must have a teacher, 'odes' has none: add --teacher-for TYPE=NAME",
    ),
    "teacher without lines": (
        {"train": {"data_path": "typed.jsonl", "gkd_coefficient": 1, "teacher_for": ["pde=x", "x"]},
         "more_workers": [{"mode": "teacher", "name": "x"}]},
        "--teacher-for pde=x names a teacher that nobody uses",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_what_no_command_would_take_is_the_only_finding(case):
    changes, said = OPTIONS[case]
    [line] = look(**changes)
    assert line.startswith("error    options ") and said in line


@pytest.mark.parametrize("case", RUNS)
def test_a_broken_run_is_told_in_one_line(case):
    changes, said = RUNS[case]
    lines = look(**changes)
    assert sum(said in line for line in lines) == 1, lines
    assert len(lines) <= 2, lines  # a second line says what follows from the first


LINES = {
    "json": ("{'input': 1}\n", "questions.jsonl line 3, expected a JSON object, got"),
    "no object": ("[1]\n", "questions.jsonl line 3, expected a JSON object, got [1]"),
    "column": ({"prompt": "x"}, "questions.jsonl line 3, column 'input': expected"),
    "empty": ({"input": ""}, "questions.jsonl line 3, column 'input'"),
    "ids": ({"input_token_ids": [500]}, "questions.jsonl line 3, column 'input_token_ids'"),
    "chat": ({"messages": [{"role": "user", "content": "x"}]}, "for a tokenizer without a chat tem"),
}  # fmt: skip


@pytest.mark.parametrize("case", LINES)
def test_a_broken_line_is_told_with_its_number(case):
    line, said = LINES[case]
    write("questions.jsonl", *questions(num=2), line, *questions(2))
    [found] = look()
    assert found.startswith("error    data ") and said in found


def test_each_kind_of_broken_line_has_a_line_of_its_own():
    write("questions.jsonl", QUESTION, "[1]\n", {"prompt": "x"}, "[1]\n", *questions(40))
    lines = look()
    assert len(lines) == 2 and "line 2 and 1 more like it" in lines[0] and "line 3" in lines[1]


def test_files_that_are_no_data_are_told():
    write("empty.jsonl")
    write("data.xml", "<x/>")
    assert "empty.jsonl must hold at least one line" in look(train={"data_path": "empty.jsonl"})[0]
    assert "must end in one of .jsonl" in look(train={"data_path": "data.xml"})[0]


def cut(path):
    Path(path).write_bytes(Path(path).read_bytes()[:1000])


def adapter(folder):
    Path(folder, "model.safetensors").rename(f"{folder}/adapter_model.safetensors")
    write(f"{folder}/adapter_config.json", {"base_model_name_or_path": "base"})


MODEL_CASES = {
    "config": (lambda: Path("model/config.json").unlink(), "a model folder must hold config.json"),
    "weights": (lambda: Path("model/model.safetensors").unlink(), "a model folder must hold weights"),
    "cut": (lambda: cut("model/model.safetensors"), "must be a whole safetensors file"),
    "tokenizer": (lambda: Path("model/tokenizer.json").unlink(), "must hold its tokenizer"),
    "gguf": (lambda: Path("model/model.safetensors").rename("model/model.gguf"), "model holds GGUF"),
    "adapter": (lambda: adapter("model"), "model holds an adapter of base alone: give"),
    "no json": (lambda: Path("model/config.json").write_text("{"), "config.json of model must be"),
}  # fmt: skip


def peft_adapter(base):
    Path("adapter").mkdir()
    write("adapter/adapter_config.json", {"base_model_name_or_path": base})
    write("adapter/adapter_model.safetensors", "")
    return [{"mode": "judge", "name": "strict", "model_path": "adapter"}]


def test_a_worker_s_adapter_is_looked_at_as_its_base():
    assert look(more_workers=peft_adapter(TINY)) == []


def test_a_worker_s_adapter_without_its_base_is_told():
    [line] = look(more_workers=peft_adapter("/x/y"))
    assert "an adapter needs the model that it belongs to" in line and "'/x/y' is neither" in line


CONFIGS = {
    "bert": ({"architectures": ["BertModel"]}, "must be a causal language model, got ['BertModel']"),
    "quantised": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "use the full-precision model"),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "async-grpo dequantize model model-bf16"),
    "vocabulary": ({"vocab_size": 64}, "must not know more tokens than its config's vocab_size (64)"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODEL_CASES)
def test_a_broken_model_folder_is_told(case):
    break_it, said = MODEL_CASES[case]
    change = model()
    break_it()
    [line] = look(train=change)
    assert line.startswith("error    model ") and said in line


@pytest.mark.parametrize("case", CONFIGS)
def test_a_model_that_cannot_be_trained_is_told(case):
    changes, said = CONFIGS[case]
    [line] = look(train=model(**changes))
    assert line.startswith("error    model ") and said in line


def saved_adapter(*, layers=4, **config):
    """The folder of an adapter of peft's own, with another configuration."""
    sizes = AutoConfig.from_pretrained(TINY, num_hidden_layers=layers)
    base = AutoModelForCausalLM.from_config(sizes)
    own = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(base, own).save_pretrained("saved")
    stated = json.loads(Path("saved/adapter_config.json").read_text())
    write("saved/adapter_config.json", stated | config)
    return {"adapter_path": "saved"}


BF16 = {"dtype": "bfloat16"}
ADAPTERS = {  # options of the trainer, of the worker, and what is said
    "no folder": (lambda: {"adapter_path": "sums.jsonl"}, {}, "--adapter-path must hold an adapter"),
    "one that alters": (lambda: {"lora_rank": 4, "lora_init": "pissa"}, {}, "--lora-init must leave"),
    "saved, alters": (lambda: saved_adapter(init_lora_weights="pissa"), {}, "has init_lora_weights 'pissa'"),
    "another kind": (lambda: saved_adapter(peft_type="IA3"), {}, "peft_type"),
    "another model's": (lambda: saved_adapter(layers=2), {}, "for this model and no others"),
    "dropout": (lambda: saved_adapter(lora_dropout=0.1), {}, "lora_dropout 0.1 of saved is switched off"),
    "no such layers": (lambda: {"lora_rank": 4, "lora_targets": "c_attn"}, {}, "names none that it can"),
    "no linear layers": (lambda: {"lora_rank": 4, "lora_targets": "embed_tokens"}, {}, "must be of linear layers"),
    "alone, decomposed": (lambda: {"lora_rank": 4, "use_dora": True, "adapter_publication": "adapter"},
                          {}, "must be merged: vLLM serves no adapter with --use-dora"),
    "alone, more modules": (lambda: {"lora_rank": 4, "modules_to_save": "norm", "adapter_publication": "adapter"},
                            {}, "must be merged: vLLM serves no other modules"),
    "alone, a smaller room": (lambda: {"lora_rank": 32}, BF16 | {"max_lora_rank": 16},
                              "worker of [[worker]] generation serves adapters up to rank 16"),
    "too few at a time": (lambda: {"lora_rank": 4, "max_staleness": 3}, BF16 | {"max_lora_rank": 4},
                          "serves 4 adapters at a time, and 5 versions may be in use"),
    "merged into an engine of adapters": (lambda: {"lora_rank": 4, "adapter_publication": "merged"},
                                          {"max_lora_rank": 4}, "--max-lora-rank is for workers that are sent adapters alone"),
}  # fmt: skip


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_that_cannot_be_trained_or_sent_is_told(case):
    make, worker, said = ADAPTERS[case]
    [line] = look(train=make(), worker=worker)
    assert said in line


@pytest.mark.parametrize(
    ("train", "worker", "said"),
    [
        (
            {},
            {},
            "workers are sent weights with the adapter merged into them: worker of [[worker]] generation serves adapters up to rank 0",
        ),
        ({}, BF16, "workers are sent the adapter alone: they are started for it"),
        ({"use_dora": True}, BF16, "merged into them: vLLM serves no adapter with --use-dora"),
    ],
)
def test_how_an_adapter_gets_to_workers_is_told(train, worker, said):
    file = run_file(train={"lora_rank": 4} | train, worker=worker)
    told = [str(each) for each in findings_of([file], tries_rewards=False)]
    assert any(said in line for line in told), told
    assert any("rank 4 of all-linear, computed as if merged" in line for line in told)


def test_a_folder_that_holds_another_run_is_told():
    Path("run/training_metrics.jsonl").write_text("{}\n")
    [line] = look()
    assert "error    start" in line and "holds a run already" in line and "--overwrite" in line


def test_overwrite_in_a_file_is_told_where_the_folder_holds_a_checkpoint():
    Path("run/checkpoints/batch_3").mkdir(parents=True)
    Path("run/checkpoints/batch_3/COMMITTED").touch()
    [line] = look(train={"overwrite": True})
    assert line.startswith("error    output ") and "--overwrite must be typed to remove" in line


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        [line] = look(train={"gateway": str(port)})
    assert line.startswith("error    gateway ") and f"127.0.0.1:{port}" in line


def test_a_machine_that_is_too_small_is_told(monkeypatch):
    small = {"disk_free_bytes": 1 << 20, "shared_bytes": 1 << 20, "memory_bytes": 1 << 40}
    monkeypatch.setattr(facts, "_machine", lambda output: small)
    disk, memory = look()
    assert (
        disk.startswith("error    disk        run has 0.00098 GiB free") and "--output-dir" in disk
    )
    assert memory.startswith("warning  memory ") and "--shm-size" in memory


def test_a_package_that_does_not_fit_is_told(monkeypatch):
    monkeypatch.setattr(facts, "unfit_packages", lambda: ["ray must be >=2.60, got 1.0"])
    [line] = look()
    assert line.startswith("error    packages    ray must be >=2.60, got 1.0: run `make setup`")


REWARDS = {
    "name": ({"reward_fns": "countdwon"}, "--reward-fns must be adapters of reward_registry"),
    "file": ({"reward_fns": "no.py:grade"}, "--reward-fns must name a file that exists"),
    "column": ({"reward_fns": "own.py:grade"}, "KeyError: 'solution'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REWARDS)
def test_a_broken_reward_is_told(case):
    changes, said = REWARDS[case]
    write("own.py", "def grade(sample):\n    return float(sample['solution'])\n")
    [line] = look(worker=changes, tries_rewards=True)
    assert line.startswith("error    reward ") and said in line


def test_a_reward_that_hangs_is_told_while_it_hangs(monkeypatch):
    monkeypatch.setattr(worker_tables, "TRIAL_S", 0.5)
    write("own.py", "import time\n\n\ndef grade(sample):\n    time.sleep(100)\n")
    began = time.monotonic()
    [line] = look(worker={"reward_fns": "own.py:grade"}, tries_rewards=True)
    assert time.monotonic() - began < 30  # its limits, three times that of --verifier-timeout-s
    assert line.startswith("warning  reward ") and "own.py:grade had not graded" in line


def test_a_reward_of_the_data_that_no_verifier_has_is_told():
    data = [{"type": "sums", "path": "sums.jsonl", "rewards": ["mathd"]}]
    [line] = look(train={"data_path": None}, data=data, tries_rewards=True)
    assert "--data of sums must name rewards that verifiers have, got 'mathd'" in line


def test_what_is_odd_is_only_warned_of():
    write("questions.jsonl", *questions(num=3))
    [line] = look()
    assert line.startswith("warning  data ") and "holds 3 lines, fewer than --batch-size 32" in line
    change = {"batch_size": 1, "samples_per_question": 2, "nproc_per_node": 3}
    assert any("leaves ranks idle" in line for line in look(train=change))


ODD = {
    "evaluation": ({"train": {"eval_data_path": "questions.jsonl"}}, "warning  data        40 of the 40 questions of questions.jsonl (held out) are in questions.jsonl"),
    "rate": ({"train": {"learning_rate": 0.0}}, "warning  options     --learning-rate is 0: nothing is learnt"),
    "temperature": ({"train": {"temperature": 50.0}}, "warning  options     --temperature 50 samples close to noise"),
    "warm-up": ({"train": {"num_warmup_steps": 100, "num_training_batches": 5}}, "the learning rate warms up for 100 steps, the run has 5"),
    "cpus": ({"launch": {"num_cpus": 1}, "worker": {"num_workers": 3}}, "num_cpus 1 is fewer than the 3 workers of the file"),
    "ranks": ({"train": {"nproc_per_node": 256}}, "--nproc-per-node 256 exceeds the"),
}  # fmt: skip
CANNOT = {
    "positions": ({"worker": {"max_model_len": 5000}}, "error    worker      --max-model-len must not exceed the 512 positions of"),
    "two rewards": ({"more_workers": [{"mode": "verifier", "model_path": "", "reward_fns": "mathd"}]}, "error    rewards     --reward-fns and --reward-registry must be those"),
    "no room for an episode": (
        {"worker": {"max_model_len": 128}, "more_workers": [{"mode": "environment"}],
         "train": {"max_tokens_per_gpu": 256, "environment": f"{REPOSITORY}/examples/treasure_hunt.py:TreasureHunt"}},
        "serves at most 128 tokens, an episode needs 256: start it with a larger --max-model-len",
    ),
    "no room": ({"worker": {"max_model_len": 20}}, "error    worker      worker of [[worker]] generation serves at most 20 tokens"),
    "program": ({"launch": {"prepare": "no-such-program x"}}, "error    prepare     [launch] prepare must name a program that is there, no-such-program is not"),
    "script": ({"launch": {"prepare": "python no.py x"}}, "error    prepare     [launch] prepare must name a script that is there, no.py is not"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*ODD, *CANNOT])
def test_what_is_not_meant_is_told_in_one_line(case):
    changes, said = (ODD | CANNOT)[case]
    [line] = look(**changes)
    assert said in line


CHATS = [{"messages": [{"role": "user", "content": f"{n}+1="}]} for n in range(40)]
ODD_LINES = {
    "copies": ([*questions(), *questions(num=10)], "10 of 50 lines of odd.jsonl are copies"),
    "column": ([*questions(num=30), *[{"input": str(n), "answer": "2", "nums": [2]} for n in range(10)]],
               "column target of the first line of odd.jsonl is missing in 10 later lines"),
    "role": ([*CHATS[:39], {"messages": [{"role": "usr", "content": "1"}, *CHATS[0]["messages"]]}],
             "1 messages of odd.jsonl have the role 'usr', which templates do not know: correct it, the nearest is user"),
    "unknown": ([{"input": "\u4e00" * 20 + str(n)} for n in range(40)], "of the first prompts of odd.jsonl are unknown to the model's tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD_LINES)
def test_lines_that_are_odd_are_warned_of(case):
    lines, said = ODD_LINES[case]
    write("odd.jsonl", *lines)
    train = {"data_path": "odd.jsonl", "batch_size": 8}
    changes = {"train": {**train, "model_name_or_path": CHAT}, "worker": {"model_path": CHAT}}
    [line] = look(**changes if case == "role" else {"train": train})
    assert line.startswith("warning  data ") and said in line


def edit_weights(edit):
    tensors = {
        name: tensor.clone() for name, tensor in load_file("model/model.safetensors").items()
    }
    edit(tensors)  # a copy: those of the file are read as long as it is there
    save_file(tensors, "model/model.safetensors", metadata={"format": "pt"})


def index_of_two(shards=("a", "b")):
    tensors = load_file("model/model.safetensors")
    Path("model/model.safetensors").unlink()
    places = {name: f"{'ab'[n % 2]}.safetensors" for n, name in enumerate(tensors)}
    save_file({n: t for n, t in tensors.items() if places[n][0] == "a"}, "model/a.safetensors")
    Path("model/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


NAN = {"model.norm.weight": torch.full((128,), float("nan"))}
WEIGHTS = {
    "shard": ({}, index_of_two, "must hold every file that model.safetensors.index.json names, 1 are not there, first b.safetensors"),
    "tensor": ({}, lambda: edit_weights(lambda t: t.pop("model.norm.weight")), "must hold every parameter of its config, 1 of 46 are missing, first model.norm.weight"),
    "width": ({"intermediate_size": 256}, None, "must have the shape that config.json gives it ([128, 256]), it has [128, 384]"),
    "too many layers": ({"num_hidden_layers": 3, "layer_types": None}, None, "11 tensors are of more, first model.layers.3"),
    "too few layers": ({"num_hidden_layers": 5, "layer_types": None}, None, "11 of 57 are missing, first model.layers.4"),
    "not finite": ({}, lambda: edit_weights(lambda t: t.update(NAN)), "model.norm.weight in model/model.safetensors must be finite"),
    "unexpected": ({}, lambda: edit_weights(lambda t: t.update({"vision.weight": torch.ones(2)})), "1 tensors of model are of no use to its config, first vision.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_are_held_against_the_config(case, monkeypatch):
    monkeypatch.setattr("async_grpo.check.facts.WEIGHTS_S", 60.0)  # on a busy machine, all of them
    config, break_it, said = WEIGHTS[case]
    change = model(**config)
    (break_it or (lambda: None))()
    [line] = look(train=change)
    assert line.startswith(("error    model ", "warning  model ")) and said in line


LAUNCHED = """no room;no room for an episode;heads;no such data;no such held-out data;no such model;worker's model
    trackers;output;resume;engine's option;mapping;top-k;environment's class;no reference;nccl
    no teacher;deterministic;positions;two rewards;program;script"""


@pytest.mark.parametrize("case", [part.strip() for part in LAUNCHED.replace("\n", ";").split(";")])
def test_launch_says_the_same_before_it_starts_anything(case, monkeypatch):
    changes, said = (RUNS | CANNOT)[case]
    found = [line.split(maxsplit=2) for line in look(**changes)]
    monkeypatch.setattr(launch_file, "interrupt_once", lambda: None)
    monkeypatch.setattr(launch_file, "_train", lambda run: pytest.fail("it began"))
    monkeypatch.setattr(launch_file, "_finish", lambda *command: pytest.fail("it prepared"))
    done = CliRunner().invoke(launch_file.launch, ["run.toml"])
    error = done.stderr.rpartition("error: ")[2]
    assert done.exit_code == 1 and said.split("  ")[-1].strip() in error
    assert any(text.split(", ")[0] in error for level, _, text in found if level == "error")
    assert not Path("run/logs").exists()


def test_launch_warns_of_what_is_odd_and_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(launch_file, "interrupt_once", lambda: None)
    monkeypatch.setattr(launch_file, "_train", lambda run: None)
    with caplog.at_level("WARNING"):
        done = CliRunner().invoke(launch_file.launch, [run_file(train={"temperature": 50.0})])
    assert done.exit_code == 0 and "warning: --temperature 50 samples close to" in caplog.text


def run_of(file):
    return planned(config=file, train_options=(), prepare="", num_cpus=4, ray_address="")


def beside(run, command, say):
    run.logs.mkdir(parents=True)
    with CheckBeside(run, command=command, say=say) as found:
        while not found.is_told:
            found.check()
            time.sleep(0.05)


def test_the_check_beside_a_start_says_its_warnings_and_raises_its_errors():
    said = []
    told = [("warning", "data", "a b: c"), ("ok", "x", "y"), ("error", "model", "d: e")]
    found = json.dumps([asdict(Finding(*each)) for each in told])
    script = f"echo noise; echo '{found}' >$3"  # behind `check`, its file and --beside
    with pytest.raises(ConfigError, match=r"^d: e$"):
        beside(run_of(run_file()), ("sh", "-c", script), said.append)
    assert said == ["warning: a b: c"]


def test_a_check_that_has_failed_ends_no_start():
    beside(run_of(run_file()), ("sh", "-c", "echo Traceback; exit 1"), pytest.fail)


@pytest.mark.slow
def test_the_check_beside_a_start_finds_what_takes_seconds():
    write("questions.jsonl", *questions(num=2), "[1]\n", *questions(2))
    with pytest.raises(ConfigError, match=r"jsonl line 3, expected a JSON object, got \[1\]"):
        beside(run_of(run_file()), COMMAND, pytest.fail)


GRADING = """
from async_grpo.environments.base import Environment

class Base(Environment):
    async def grade(self, question, episodes, services): return []

class Own(Base):
    async def play(self, question, policy, services): return policy.episode()

class Asks(Environment):
    async def play(self, question, policy, services): return policy.episode()
"""


@pytest.mark.parametrize(("name", "is_told"), [("Own", False), ("Asks", True)])
def test_verifiers_are_needed_unless_the_environment_grades_itself(name, is_told):
    write("own.py", GRADING)
    train = {"environment": "own.py:" + name, "max_tokens_per_gpu": 256}
    environment = [{"mode": "environment", "model_path": "", "reward_fns": "math_verify"}]
    lines = look(worker={"reward_fns": ""}, train=train, more_workers=environment)
    told = "run.toml needs a [[worker]] for the role verifier: give one --reward-fns"
    assert lines == ([f"error    roles       {told}"] if is_told else [])


def test_the_row_of_the_model_s_family_is_told_in_one_line():
    kind = json.loads(Path(TINY, "config.json").read_text())["model_type"]
    told = [str(each) for each in findings_of([run_file()], tries_rewards=False)]
    [line] = [line for line in told if line.startswith("ok       family ")]
    assert line.endswith(f"{kind}: trains: yes (packed); engines serve it: yes")


def test_a_chat_template_that_is_none_is_told_in_one_line():
    shutil.copytree(CHAT, "model")
    Path("model/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }")
    [line] = look(train={"model_name_or_path": "model"}, worker={"model_path": "model"})
    assert (
        "the chat template of model must be one that Jinja reads, but: TemplateSyntaxError" in line
    )


def test_a_config_that_transformers_chokes_on_is_told_in_one_line():
    [line] = look(train=model(architectures=["MambaForCausalLM"], model_type="mamba"))
    assert line.startswith(
        "error    model       config.json of model must be one that transformers"
    )


def test_whatever_else_a_check_raises_is_a_finding_that_names_it(monkeypatch):
    def check_luck(setup, facts):
        yield Finding("ok", "luck", "here")
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(checks, "CHECKS", checks.CHECKS | {check_luck: Cost.AT_ONCE})
    done = CliRunner().invoke(check, [run_file(worker={"reward_fns": ""})])
    [line] = [line for line in done.stdout.splitlines() if "luck" in line]
    assert line.startswith(
        "error    luck        it cannot be looked at, ZeroDivisionError: division"
    )
    assert done.exit_code == 1


def test_a_judge_at_an_address_is_no_error(monkeypatch):
    monkeypatch.setenv("JKEY", "x")
    judge = {
        "mode": "judge",
        "name": "j",
        "judge_url": "http://127.0.0.1:9/v1",
        "judge_key": "JKEY",
    }
    assert look(more_workers=[judge], train={"judges": "j"}) == []


def test_a_judge_s_engine_serves_quantised_weights_as_they_are():
    path = model(quantization_config={"quant_method": "fp8"})["model_name_or_path"]
    judge = {"mode": "judge", "name": "j", "model_path": path}
    assert look(more_workers=[judge], train={"judges": "j"}) == []
    judge = {"mode": "logprob", "model_path": path}
    assert any("must not be quantised" in line for line in look(more_workers=[judge]))


def test_a_causal_model_is_no_reward_model():
    reward = {"mode": "reward", "model_path": TINY}
    (said,) = look(more_workers=[reward])
    assert "--mode reward must serve a sequence classifier of one label" in said


def test_each_file_has_a_time_of_its_own(monkeypatch):
    monkeypatch.setattr(data_read, "DATA_S", 0.2)
    write("questions.jsonl", *questions(num=30_000))
    run_file(train={"eval_data_path": "sums.jsonl"})
    text = " ".join(each.text for each in findings_of(["run.toml"], tries_rewards=False))
    assert (
        "so far; the run checks" in text
        and "ask each of" not in text
        and "sums.jsonl (held out): 40 lines, prompts" in text
    )


SPY = """
import os, pathlib, socket
from async_grpo.algorithms.grpo import Grpo

seen = [name for name in os.listdir("/proc") if name.isdigit() and name != str(os.getpid())]
try:
    pathlib.Path("spied").write_text("x")
    seen.append("a folder")
except OSError:
    pass
seen += [path for path in ("~/.ssh", "~/.aws") if os.path.isdir(os.path.expanduser(path))
         and os.listdir(os.path.expanduser(path))]
try:
    socket.create_connection(("127.0.0.1", int(pathlib.Path("port").read_text())), timeout=2)
    seen.append("the network")
except OSError:
    pass
seen += [name for name in os.environ if "SECRET" in name]
if seen:
    raise RuntimeError(f"the spy saw {seen}")


class Mine(Grpo):
    pass


def grade(sample):
    return 1.0
"""


@pytest.fixture
def spy(monkeypatch, tmp_path):
    """A file that looks around as it is imported, on a machine with secrets."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id").write_text("secret")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("A_SECRET", "x")
    write("spy.py", SPY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        Path("port").write_text(str(server.getsockname()[1]))
        yield {"algorithm": "spy.py:Mine"}


def test_an_algorithm_is_asked_of_itself_in_a_confinement(spy, monkeypatch):
    monkeypatch.setattr("async_grpo.planning.prediction.SIMULATED_SAMPLES", 32)
    monkeypatch.setattr("async_grpo.planning.prediction.MEASURED", (1, 1))
    assert look(train=spy) == []
    dry = CliRunner().invoke(launch_file.launch, ["run.toml", "--dry-run"])
    assert (dry.exit_code, dry.stderr) == (0, "")
    done = CliRunner().invoke(plan, ["run.toml", "--devices", "1xH100"])
    assert "spy saw" not in done.stderr
    assert not Path("spied").exists()


def test_a_reward_is_tried_in_a_confinement_without_the_network(spy):
    assert look(worker={"reward_fns": "spy.py:grade"}, tries_rewards=True) == []
    assert not Path("spied").exists()


def test_a_trusted_algorithm_is_imported_as_it_is(spy):
    assert "the spy saw" in look(train=spy, trusted=True)[0] and Path("spied").exists()


def test_where_nothing_is_confined_no_algorithm_is_imported(spy, monkeypatch, tmp_path):
    monkeypatch.setattr(confinement, "find_bwrap", lambda: f"{refusing_bwrap(tmp_path)}/bwrap")
    [line] = look(train=spy)
    assert line.startswith("error    algorithm ") and REFUSAL in line and "give --trust" in line
    assert not Path("spied").exists()


STRANGE = {
    "prepare": {"launch": {"prepare": "python evil.py"}},
    "algorithm": {"train": {"algorithm": "evil.py:Evil"}},
    "environment": {"train": {"environment": "agent:python evil.py"}},
    "reward_fns": {"worker": {"reward_fns": "evil.py:grade"}},
    "judge_url": {
        "more_workers": [
            {"mode": "judge", "name": "j", "judge_url": "http://evil", "judge_key": "HOME"}
        ]
    },
    "reward_registry": {"worker": {"reward_registry": "evil.py"}},
    "mode": {"more_workers": [{"mode": "evil.py:Evil"}]},
}


@pytest.mark.parametrize("option", STRANGE)
def test_code_of_a_file_from_elsewhere_is_refused_by_name(option, monkeypatch):
    run_file(**STRANGE[option])
    write("evil.py", "raise SystemExit('it ran')\n")
    Path("here").mkdir()
    monkeypatch.chdir("here")
    monkeypatch.setattr(launch_file, "run_here", lambda run: pytest.fail("it began"))
    for command in (launch_file.launch, check, plan):
        done = CliRunner().invoke(command, ["../run.toml"])
        assert done.exit_code == 1
        assert f"../run.toml lies outside this folder, and its {option} names '" in done.output
        assert "--trust" in done.output


def test_a_file_from_elsewhere_without_code_is_a_run_as_any(monkeypatch):
    run_file(train={"data_path": "../questions.jsonl"})
    Path("here").mkdir()
    monkeypatch.chdir("here")
    assert [each for each in findings_of(["../run.toml"]) if each.level == "error"] == []


def test_code_that_was_typed_is_nobody_elses(monkeypatch):
    run_file(train={"data_path": "../questions.jsonl"})
    Path("here").mkdir()
    monkeypatch.chdir("here")
    write("own.py", "from async_grpo.algorithms.grpo import Grpo\n\n\nclass Mine(Grpo): ...\n")
    found = findings_of(["../run.toml", "--algorithm", "own.py:Mine"], tries_rewards=False)
    assert [str(each) for each in found if each.level == "error"] == []


def test_a_file_from_elsewhere_that_is_trusted_is_taken(monkeypatch):
    run_file(launch={"prepare": "true"}, train={"data_path": "../questions.jsonl"})
    Path("here").mkdir()
    monkeypatch.chdir("here")
    begun = []
    monkeypatch.setattr(launch_file, "run_here", begun.append)
    assert CliRunner().invoke(launch_file.launch, ["../run.toml", "--trust"]).exit_code == 0
    assert len(begun) == 1


TEMPORARY = "import tempfile\n\nwith tempfile.TemporaryFile() as file:\n    file.write(b'x')\n\n\n"


@pytest.mark.parametrize(
    "imported", [TEMPORARY, pytest.param("import torch\n\n\n", marks=pytest.mark.slow)]
)
def test_a_reward_whose_import_needs_a_temporary_folder_is_imported(imported):
    write("own.py", f"{imported}def grade(sample):\n    return 1.0\n")
    assert look(worker={"reward_fns": "own.py:grade"}, tries_rewards=True) == []


GOOD = {
    "as it is": {},
    "reference": {"train": {"kl_coefficient": 0.1}, "more_workers": [{"mode": "logprob"}]},
    "preset": {"train": {"preset": "dapo", "learning_rate": 1e-5}},
    "types": {"train": {"data_path": None}, "data": [
        {"type": "sums", "path": "sums.jsonl", "weight": 2, "eval_path": "questions.jsonl"},
        {"type": "odes", "path": "pairs.jsonl", "rewards": ["countdown"]}]},
    "teacher": {"train": {"gkd_coefficient": 1, "teacher_for": ["x"]},
                "more_workers": [{"mode": "teacher", "name": "x"}]},
    "pairs": {"train": {"gkd_coefficient": 1, "teacher_for": ["x"], "gkd_lambda": 0.5,
                        "pairs_path": "pairs.jsonl"},
              "more_workers": [{"mode": "teacher", "name": "x"}]},
    "columns": {"train": {"column_mapping": "answer=target", "eval_data_path": "sums.jsonl"}},
    "steps": {"train": {"train_minibatch_size": 8, "nproc_per_node": 2, "max_staleness": 0,
                        "deterministic": True}},
    "gateway": {"train": {"gateway": "0"}},
    "environment": {"train": {"max_tokens_per_gpu": 256, "environment": f"{REPOSITORY}/examples/treasure_hunt.py:TreasureHunt"},
                    "more_workers": [{"mode": "environment"}]},
    "chat": {"train": {"model_name_or_path": CHAT}, "worker": {"model_path": CHAT}},
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_a_good_run_is_left_alone(case):
    assert look(**GOOD[case]) == []


def test_a_good_run_with_its_rewards_is_left_alone():
    assert look(tries_rewards=True) == []


def test_rewards_that_cannot_be_confined_are_told_as_a_run_would_take_them(monkeypatch, tmp_path):
    monkeypatch.setattr(confinement, "find_bwrap", lambda: f"{refusing_bwrap(tmp_path)}/bwrap")
    [line] = look(tries_rewards=True)  # graders that execute no text
    assert line.startswith("warning  confinement ") and REFUSAL in line
    write("own.py", "def grade(sample):\n    return 1.0\n")
    own = {"reward_fns": "own.py:grade"}
    [line] = look(tries_rewards=True, worker=own)
    assert line.startswith("error    reward ") and "--unconfined-rewards" in line
    for permitted in ({"launch": {"unconfined_rewards": True}}, {"typed": "--unconfined-rewards"}):
        typed = [permitted.pop("typed")] if "typed" in permitted else []
        [line] = look(*typed, tries_rewards=True, worker=own, **permitted)
        assert line.startswith("warning  reward      own.py:grade will run UNCONFINED")
    [line] = look(*typed, tries_rewards=True, trusted=True, worker=own)
    assert line.startswith("warning  confinement own rewards run UNCONFINED")


def test_a_supervised_run_needs_neither_workers_nor_cluster():
    options = ["--algorithm", "sft", "--model-name-or-path", TINY, "--data-path", "pairs.jsonl",
               "--output-dir", "run", "--trackers", "None"]  # fmt: skip
    findings = findings_of(options)
    assert {finding.level for finding in findings} == {"ok"}
    assert any("a batch is 32 pairs, in 1 gradient step of 32" in each.text for each in findings)


def test_options_of_launch_are_taken_as_launch_takes_them():
    [line] = look("--ray-address", "127.0.0.1:1", "--num-training-batches", "3")
    assert line.startswith("error    cluster ") and "no Ray cluster answers at 127.0.0.1:1" in line
    assert look("--prepare", "make none.jsonl", train={"data_path": "none.jsonl"}) == []


def test_what_prepare_makes_waits_for_it():
    Path("make.py").touch()
    prepare = "python make.py --output made.jsonl && python make_model.py --folder made"
    changes = {
        "train": {"data_path": "made.jsonl", "model_name_or_path": "made/final"},
        "worker": {"model_path": "made/final"},
        "launch": {"prepare": prepare},
    }
    assert look(**changes) == []
    findings = findings_of(["run.toml"], tries_rewards=False)
    waiting = [finding.text for finding in findings if finding.level == "waits"]
    assert waiting[0].startswith("made/final is made by [launch] prepare")


@pytest.mark.parametrize(
    ("path", "is_made"),
    [
        ("a/b.jsonl", True), ("c/d.jsonl", True), ("c/e/final", True), ("b.jsonl", False),
        ("a/b.json", False), ("f", True), ("questions.jsonl", False),
    ],
)  # fmt: skip
def test_a_path_is_prepared_that_a_command_names_and_nobody_has(path, is_made):
    words = ("sh", "-c", "cat x > c/d.jsonl", "--output=a/b.jsonl", "c/e", "questions.jsonl", "f")
    config = TrainConfig(model_name_or_path="m", data_path="d")
    assert Setup(train=config, prepare=(words,)).is_prepared(path) is is_made


EXAMPLES = [
    str(path.relative_to(REPOSITORY))
    for path in sorted(REPOSITORY.glob("examples/**/*.toml"))
    if path.name != "pyproject.toml"
]

OF_DEVICES = (
    "deepscaler",
    "lora_7b",
    "one_gpu",
    "qwen_7b",
)  # more than the memory of most machines


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_passes_as_far_as_its_data_is_there(example, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    findings = findings_of([example, "--trackers", "None"], tries_rewards=False)
    told = [str(each) for each in findings if each.level in ("warning", "error")]
    # Without a network a model of the hub is refused, by what a run would say; and what is made for
    # devices has more ranks than a small machine has cores.
    # `verifiers_tools` says how to make the environment that its first command lies in.
    expected = (
        "nor a model in Hugging Face's cache",
        "cores of this machine",
        "runs/vf/bin/python",
        *(["--unchecked-memory starts it"] if Path(example).stem in OF_DEVICES else []),
    )
    assert [line for line in told if not any(part in line for part in expected)] == []


@pytest.mark.parametrize(
    ("example", "devices", "told"),
    [
        ("one_gpu", "1xL4", "1 trainer rank with 55% of a device and its memory, 1 generation worker with 35%"),
        ("lora_7b", "1", "1 trainer rank with 55% of a device and its memory, 1 generation worker with 40%"),
        ("qwen_7b", "8", "4 trainer ranks with a device each, 4 generation workers with a device each"),
        ("deepscaler", "8,8,8", "8 trainer ranks with a device each, 14 generation workers with a device each, 2 reference"),
    ],
)  # fmt: skip
def test_devices_of_other_machines_are_those_of_plan_for(example, devices, told, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    typed = [f"examples/{example}.toml", "--trackers", "None"]
    found = findings_of(typed, tries_rewards=False, plan_for=devices)
    [finding] = [each for each in found if each.subject == "devices"]
    assert finding.level == "ok" and told in finding.text


def test_the_command_ends_with_1_after_an_error_and_lists_findings_as_json():
    done = CliRunner().invoke(check, [run_file(train={"batch_size": 0}), "--json"])
    assert done.exit_code == 1
    [finding] = json.loads(done.stdout)
    assert finding["level"] == "error" and "--batch-size must be positive" in finding["text"]
    done = CliRunner().invoke(check, [run_file(), "--num-training-batches=3"])
    assert done.exit_code == 0 and "3 batches are 768 samples and 3 steps" in done.stdout
