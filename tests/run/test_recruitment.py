from dataclasses import replace
from pathlib import Path

import pytest
from fake_cluster import controller_client

from async_grpo.config.roles import (
    ENVIRONMENT,
    GENERATION,
    REFERENCE,
    VERIFIER,
    service,
    teacher,
)
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.model.model_folder import ModelFacts
from async_grpo.run.output_folder import LAUNCH_LOGS
from async_grpo.run.recruitment import Demand, check_worker, command_for, recruit
from async_grpo.types import WorkerInfo
from async_grpo.util.errors import ConfigError, DeadlineError

WORKER = WorkerInfo("w1", "generation", "node", 1, "other-model", 128, 8.0, 0.0, max_model_len=48)
MATH = teacher("math")
TESTS = Path(__file__).parents[1]
SECOND_TRY = f"{TESTS.parent}/examples/calculator_service.py:SecondTry"
CALCULATOR = service("calculator")
OPD = f"{TESTS}/algorithms/opd.py:OnPolicyDistillation"
TWO_TURNS = f"{TESTS}/environments/two_turns.py:TwoTurns"


def demand(*, longest_prompt=16, longest_pair=0, devices=(), **options):
    config = TrainConfig(
        model_name_or_path="model",
        data_path="data",
        max_generation_tokens=32,
        max_tokens_per_gpu=64,
        **options,
    )
    model = ModelFacts("model", 128, 4096, (), tokenizer_hash="ab" * 32)
    return Demand(config, model, longest_prompt, longest_pair, devices)


def test_a_worker_that_just_fits_is_taken():
    check_worker(WORKER, demand())
    check_worker(replace(WORKER, temperature=0.5), demand(temperature=0.5))
    check_worker(replace(WORKER, tokenizer_hash="ab" * 32), demand())
    check_worker(replace(WORKER, role="reference"), demand(weight_transport="nccl"))
    check_worker(replace(WORKER, role=MATH, vocab_size=256), demand())  # padded
    check_worker(WORKER, demand(longest_pair=50))  # which no generation worker reads
    check_worker(replace(WORKER, devices=("GPU-2",)), demand(devices=("GPU-0", "GPU-1")))
    shared = demand(devices=("GPU-0",), gpus_per_rank=0.4)
    check_worker(replace(WORKER, devices=("GPU-0",)), shared)
    check_worker(WorkerInfo("e1", ENVIRONMENT, "node", 1, "", 0, 8.0, 0.0, 0), demand())


def test_ranks_share_devices_in_turns_with_engines_that_sleep_alone():
    turns = demand(devices=("GPU-0",), colocated=True)
    check_worker(replace(WORKER, devices=("GPU-0",), sleeps=True), turns)
    with pytest.raises(ConfigError, match="generation workers that can sleep, worker w1 cannot"):
        check_worker(WORKER, turns)
    with pytest.raises(ConfigError, match="have the same device GPU-0"):
        check_worker(replace(WORKER, role="reference", devices=("GPU-0",)), turns)


@pytest.mark.parametrize("engines", [("GPU-0",), ("GPU-0", "GPU-1")])
def test_a_run_in_turns_begins_when_every_rank_s_device_has_an_engine(engines):
    found = [replace(WORKER, worker_id=each, devices=(each,), sleeps=True) for each in engines]
    turns = demand(devices=("GPU-0", "GPU-1"), colocated=True, worker_timeout_s=1e-9)
    client = controller_client(members=lambda role: tuple(found))
    if len(engines) == 2:
        assert {each.worker_id for each in recruit(client, turns)} == {*engines}
    else:
        with pytest.raises(DeadlineError, match="within --worker-timeout-s"):
            recruit(client, turns)


@pytest.mark.parametrize(
    ("worker", "options", "sentence"),
    [
        (
            replace(WORKER, temperature=0.5),
            {},
            r"--temperature 1.0 must be that of worker w1, which serves 0.5: give both the same",
        ),
        (
            replace(WORKER, vocab_size=127),
            {},
            r"vocabulary has 127 tokens instead of 128: start it with --model-path model instead",
        ),
        (
            replace(WORKER, tokenizer_hash="cd" * 32),
            {},
            r"worker w1 must have the tokenizer of the model that is trained, but that of "
            r"other-model has another hash \(cdcdcdcdcdcd\) than that of model \(abababababab\): ",
        ),
        (
            WORKER,
            {"longest_prompt": 17},
            r"at most 48 tokens, .* --max-generation-tokens 32 needs 49: .* larger --max-model-len",
        ),
        (
            replace(WORKER, role="reference"),
            {"longest_prompt": 17},
            r"needs 49: start it with a larger --max-tokens-per-gpu",
        ),
        (
            replace(WORKER, role=MATH),
            {"longest_pair": 50},
            r"at most 48 tokens, the longest pair of --pairs-path needs 50: .* or drop it",
        ),
        (
            WORKER,
            {"environment": TWO_TURNS},
            r"at most 48 tokens, an episode needs 64: .* larger --max-model-len, or lower the trai",
        ),
        (
            replace(WORKER, role=MATH, tokenizer_hash="cd" * 32),
            {},
            r"worker w1 must have the tokenizer of the model that is trained, but that of other",
        ),
        (
            replace(WORKER, role=REFERENCE, devices=("GPU-1",)),
            {"devices": ("GPU-0", "GPU-1")},
            r"trainer rank 1 and worker w1 have the same device GPU-1: give Ray and trainer others",
        ),
        (
            WORKER,
            {"weight_transport": "nccl"},
            r"--weight-transport nccl needs an NVIDIA device in trainer rank 0, .* object_store",
        ),
    ],
)
def test_a_worker_that_cannot_serve_the_run_is_refused(worker, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_worker(worker, demand(**options))


@pytest.fixture
def look():
    """Recruit for options from a controller with workers of some roles: the roles asked for."""

    def look(*present, **options):
        asked = []

        def members(role):
            asked.append(role)
            return (replace(WORKER, role=role, max_model_len=64),) if role in present else ()

        recruit(controller_client(members=members), demand(worker_timeout_s=1e-9, **options))
        return asked

    return look


USUAL = (GENERATION, VERIFIER)
EVERYTHING = {"algorithm": OPD, "kl_coefficient": 0.1, "environment": TWO_TURNS}


def test_a_run_waits_for_exactly_the_roles_that_it_needs(look):
    assert look(*USUAL) == list(USUAL)
    every = [GENERATION, REFERENCE, MATH, ENVIRONMENT]
    assert look(*every, **EVERYTHING) == every
    asked = [GENERATION, ENVIRONMENT, CALCULATOR, VERIFIER]
    assert look(*asked, environment=SECOND_TRY) == asked


def test_no_verifier_is_waited_for_where_every_environment_grades_itself(look, tmp_path):
    text = "from async_grpo.environments.base import Environment\nclass Asks(Environment): ...\n"
    (tmp_path / "own.py").write_text(text)
    own = f"{tmp_path}/own.py:Asks"
    assert look(GENERATION, ENVIRONMENT, environment=TWO_TURNS) == [GENERATION, ENVIRONMENT]
    with pytest.raises(DeadlineError, match="a verifier worker"):
        look(GENERATION, ENVIRONMENT, environment=own)


def test_a_run_that_samples_nothing_needs_its_teacher_alone(look):
    pairs = {"teacher_for": "math", "gkd_coefficient": 1.0, "pairs_path": "p"}
    assert look(MATH, **pairs, gkd_lambda=0.0) == [MATH]
    assert look(MATH, *USUAL, **pairs, gkd_lambda=0.1) == [GENERATION, MATH, VERIFIER]
    held_out = {"eval_data_path": "held-out"}
    assert look(MATH, *USUAL, **pairs, **held_out, gkd_lambda=0.0) == [GENERATION, MATH, VERIFIER]


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (GENERATION, r"a generation worker, start .*--model-path model --mode generation`"),
        (REFERENCE, r"reference worker \(the KL coefficient is not 0\), .* --mode logprob`"),
        (MATH, r"teacher:math worker \(--algorithm .*opd.py:On.* --mode teacher --name math`"),
        (ENVIRONMENT, r"\(--environment .*TwoTurns is played there\), .*--mode environment`"),
        (VERIFIER, r"a verifier worker, start .*--mode verifier --reward-fns NAMES`"),
    ],
)
def test_a_missing_role_is_named_with_the_command_that_starts_it(look, missing, sentence):
    present = {GENERATION, REFERENCE, MATH, ENVIRONMENT, VERIFIER} - {missing}
    with pytest.raises(DeadlineError, match=f"within --worker-timeout-s 1e-09: .*{sentence}"):
        graded = {"environment": "single_turn"} if missing == VERIFIER else {}
        look(*present, **EVERYTHING | graded)


def test_a_missing_service_is_named_with_who_asks_it_and_what_starts_it(look):
    said = (
        r"a service:calculator worker \(.*calculator_service.py:SecondTry asks "
        r"services\['calculator'\]\), start .*--mode path/to/file.py:Name --name calculator`"
    )
    with pytest.raises(DeadlineError, match=said):
        look(GENERATION, ENVIRONMENT, VERIFIER, environment=SECOND_TRY)


def test_under_launch_nobody_is_told_to_start_a_worker(look, monkeypatch, caplog):
    monkeypatch.setenv(LAUNCH_LOGS, "run/logs")
    caplog.set_level("INFO", "async_grpo")
    with pytest.raises(DeadlineError, match=r"a generation worker, launch keeps the logs"):
        look(VERIFIER)
    assert caplog.messages == [
        "waiting for a generation worker to load; launch keeps the logs of its workers in run/logs"
    ]


@pytest.mark.parametrize("role", [GENERATION, REFERENCE, MATH, ENVIRONMENT, VERIFIER, CALCULATOR])
def test_the_command_that_a_missing_role_names_starts_that_role(role):
    words = command_for(role, model="model").strip("`").split()[2:]
    options = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    assert WorkerConfig(**options).role == role
