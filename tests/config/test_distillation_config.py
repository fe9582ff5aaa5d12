"""Options of teachers that cannot be meant are refused, in one sentence, without torch."""

import subprocess
import sys

import pytest

from async_grpo.algorithms.distillation import Distillation
from async_grpo.algorithms.find import find_algorithm
from async_grpo.algorithms.grpo import Grpo
from async_grpo.config.teaching import check_vocabulary
from async_grpo.config.train_config import TrainConfig
from async_grpo.types import Payload
from async_grpo.util.errors import ConfigError

REQUIRED = {"model_name_or_path": "m", "data_path": "d"}
GKD = {"teacher_for": "math", "gkd_coefficient": 1.0}
LOGITS = GKD | {"teacher_payload": "logits"}
OPD = {"teacher_for": "math", "opd_coefficient": 0.5}


def config(**options):
    return TrainConfig(**REQUIRED, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gkd_coefficient": 1.0}, "--gkd-coefficient needs a teacher, got 1.0: add --teacher-for"),
        ({"opd_coefficient": 0.5}, "--opd-coefficient needs a teacher, got 0.5: add --teacher-for"),
        ({"teacher_for": "math"}, "--teacher-for names a teacher that nobody uses, got 'math'"),
        (GKD | {"teacher_for": "a=x,a=y"}, "--teacher-for must name one teacher for each type"),
        (GKD | {"teacher_for": "x,y"}, "--teacher-for must name one teacher for each type"),
        (GKD | {"teacher_for": "a="}, "--teacher-for must be NAME or TYPE=NAME, got 'a='"),
        (GKD | {"gkd_alpha": 1.5}, r"--gkd-alpha must be in \[0, 1\], got 1.5"),
        (GKD | {"gkd_alpha": -0.1}, "--gkd-alpha must not be negative, got -0.1"),
        (GKD | {"gkd_temperature": 0.0}, "--gkd-temperature must be positive, got 0.0"),
        (GKD | {"gkd_top_k": 0}, "--gkd-top-k must be positive, got 0"),
        (OPD | {"ratio_level": "sequence"}, "--ratio-level must be token with --opd-coefficient"),
        (GKD | {"gkd_lambda": 0.5}, "--gkd-lambda below 1 needs pairs, got 0.5: add --pairs-path"),
        (GKD | {"gkd_lambda": 2.0}, r"--gkd-lambda must be in \[0, 1\], got 2.0"),
        (GKD | {"pairs_path": "p"}, "--pairs-path is not read with --gkd-lambda 1: .*got 'p'"),
        (
            OPD | {"gkd_lambda": 0.5, "pairs_path": "p"},
            "--gkd-lambda changes nothing while --gkd-coefficient is 0, got 0.5",
        ),
        ({"reward_coefficient": 0.0}, "--reward-coefficient must be positive without a teacher"),
        (
            GKD | {"reward_coefficient": 0.0, "dynamic_sampling": 2},
            "--dynamic-sampling acts on rewards, which --reward-coefficient 0 leaves out, got 2",
        ),
        (
            GKD | {"reward_coefficient": 0.0, "overlong_buffer_tokens": 2},
            "--overlong-buffer-tokens acts on rewards",
        ),
        (
            OPD | {"reward_coefficient": 0.0, "kl_coefficient": 0.1, "kl_estimator": "k1"},
            "--kl-coefficient acts on rewards",
        ),
        (LOGITS | {"express": "2"}, "--express must be DxT, two positive numbers, got '2'"),
        (LOGITS | {"express": "0x2"}, "--express must be DxT, two positive numbers, got '0x2'"),
        (GKD | {"express": "1x2"}, "--express needs --teacher-payload logits, got '1x2'"),
        (LOGITS | {"express": "1x2", "teacher_for": "a=x,y"}, "--express serves one teacher"),
        (GKD | {"algorithm": "sft"}, "--algorithm must be grpo to learn from teachers, got 'sft'"),
        (OPD | {"samples_per_question": 1}, "--samples-per-question must be at least 2"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(options, sentence):
    with pytest.raises(ConfigError, match=sentence) as refused:
        find_algorithm(config(**options))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("others", [{}, OPD], ids=["alone", "beside OPD"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gkd_alpha", 0.1),
        ("gkd_temperature", 2.0),
        ("teacher_temperature", 2.0),
        ("gkd_square_temperature", True),
        ("gkd_top_k", 8),
        ("teacher_payload", "hidden"),
        ("teacher_buffer_gib", 1.0),
        ("express", "1x2"),
    ],
)
def test_an_option_of_a_divergence_that_is_not_learnt_is_refused(option, value, others):
    flag = "--" + option.replace("_", "-")
    sentence = f"{flag} changes nothing while --gkd-coefficient is 0, got {value!r}: add --gkd"
    with pytest.raises(ConfigError, match=sentence):
        find_algorithm(config(**others, **{option: value}))


def test_a_clip_of_opd_without_opd_is_refused():
    for others in ({}, GKD):
        with pytest.raises(ConfigError, match="--opd-clip changes nothing while --opd-coefficient"):
            find_algorithm(config(**others, opd_clip=2.0))


@pytest.mark.parametrize(
    "options",
    [
        GKD | {"gkd_alpha": 0.0, "reward_coefficient": 0.0, "samples_per_question": 1},
        GKD | {"gkd_alpha": 1.0, "gkd_lambda": 0.0, "pairs_path": "p", "ratio_level": "sequence"},
        OPD | {"reward_coefficient": 0.0, "kl_coefficient": 0.1, "opd_clip": 2.0},
        GKD | OPD | {"teacher_for": "+=plus,-=plus,times"},
    ],
)
def test_a_teacher_s_coefficient_makes_grpo_a_distillation(options):
    assert type(find_algorithm(config(**options))) is Distillation
    assert type(find_algorithm(config())) is Grpo


def test_a_line_s_type_chooses_its_teacher_and_a_name_alone_takes_the_rest():
    routed = config(teacher_for="+=plus, -=plus,times")
    assert [routed.teacher_of(kind) for kind in ("+", "-", "*", "")] == [
        "plus", "plus", "times", "times"
    ]  # fmt: skip
    assert routed.teacher_names == ("plus", "times")
    assert config(teacher_for="+=plus").teacher_of("*") is None


def test_k_is_held_to_the_vocabulary_only_where_k_tokens_travel():
    check_vocabulary(config(**GKD, gkd_top_k=32).teaching, 32)
    check_vocabulary(config(**GKD, gkd_top_k=33, teacher_payload="hidden").teaching, 32)
    check_vocabulary(config(**OPD, gkd_top_k=33).teaching, 32)
    with pytest.raises(
        ConfigError, match=r"--gkd-top-k must not exceed the 32 tokens of .* got 33"
    ):
        check_vocabulary(config(**GKD, gkd_top_k=33).teaching, 32)


@pytest.mark.parametrize(
    ("options", "payload", "columns"),
    [
        (OPD, None, {"teacher": 0}),
        (
            GKD | {"gkd_top_k": 8, "gkd_temperature": 2.0},
            Payload("topk", 8, 2.0),
            {"teacher": 0, "teacher.ids": 8, "teacher.logprobs": 8, "teacher.tail": 0},
        ),
        (
            GKD | {"teacher_payload": "hidden", "teacher_for": "a=x,y"},
            Payload("hidden", 0, 1.0),
            {"teacher": 0, "teacher.hidden": 0, "teacher.index": 0},
        ),
        (
            GKD | OPD | {"teacher_payload": "logits", "kl_coefficient": 0.1},
            Payload("logits", 0, 1.0),
            {"reference": 0, "teacher": 0, "teacher.logits": 0},
        ),
    ],
)
def test_what_teachers_are_asked_follows_from_the_terms(options, payload, columns):
    algorithm = find_algorithm(config(**options))
    (need,) = [need for need in algorithm.needs if need.role == "teacher"]
    assert (need.payload, need.of_given) == (payload, payload is not None)
    assert algorithm.score_columns == columns
    expected = columns.keys() - {"reference"} if payload else set()
    assert algorithm.scores_of_given == expected


def test_the_run_says_whom_it_learns_from():
    options = GKD | OPD | {"teacher_for": "+=plus,times", "opd_clip": 2.0, "gkd_temperature": 2.0}
    *_, said = find_algorithm(config(**options, gkd_lambda=0.75, pairs_path="p")).in_words()
    assert said == (
        "teachers: plus for +, times for all others; rewards weigh 1; 0.5 * (teacher - policy), "
        "within ±2 nats, in each token's advantage; 1 * JSD of alpha 0.5 at temperature 2 over the "
        "teacher's 64 likeliest tokens and the rest as one, 25% of the samples given pairs"
    )
    dense = {"gkd_alpha": 0.0, "teacher_payload": "hidden", "gkd_square_temperature": True}
    *_, said = find_algorithm(config(**GKD, **dense, reward_coefficient=0.0)).in_words()
    assert said == (
        "teachers: math for all; rewards weigh 0; 1 * KL(teacher, policy) at temperature 1, times "
        "its square, over the whole vocabulary"
    )


def test_a_distillation_s_rules_import_neither_torch_nor_ray():
    script = (
        "import sys; from async_grpo.config.train_config import TrainConfig\n"
        "from async_grpo.algorithms.find import find_algorithm\n"
        f"found = find_algorithm(TrainConfig(**{REQUIRED | GKD}))\n"
        "print(type(found).__name__, {'torch', 'ray'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.strip() == "Distillation set()", found.stderr


def test_a_teacher_s_temperature_is_asked_of_it_and_said_and_is_the_common_one_by_default():
    def payload(**options):
        return find_algorithm(config(**GKD, gkd_temperature=2.0, **options)).teacher_need.payload

    assert payload() == Payload("topk", 64, 2.0)
    assert payload(teacher_temperature=0.5) == Payload("topk", 64, 0.5)
    said = " ".join(find_algorithm(config(**GKD, teacher_temperature=0.5)).in_words())
    assert "at temperature 1 (the teacher's 0.5) over" in said
