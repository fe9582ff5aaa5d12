"""Options that cannot work are refused, presets are what they say, and the run says what it is."""

import pytest

from async_grpo.algorithms.find import find_algorithm
from async_grpo.algorithms.grpo import Grpo
from async_grpo.config.objective import PRESET_NAMES, preset_options
from async_grpo.config.option import flag
from async_grpo.config.train_config import TrainConfig
from async_grpo.util.errors import ConfigError

REQUIRED = {"model_name_or_path": "m", "data_path": "d"}


def config(**options):
    return TrainConfig(**REQUIRED, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "--batch-size must be positive, got 0"),
        (
            {"stall_timeout_s": 9.0},
            "--stall-timeout-s must be at least 10, workers tell of their t",
        ),
        ({"generation_timeout_s": -1.0}, "--generation-timeout-s must not be negative, got -1.0"),
        (
            {"constrained_outputs": True},
            "--constrained-outputs needs an --environment that asks for JSON, got True: leave it",
        ),
        ({"temperature": 0.0}, "--temperature must be positive for training, got 0.0"),
        ({"learning_rate": 3.0}, r"--learning-rate must be at most 0.01, .* got 3.0: 1e-6 to 1e-5"),
        *(
            (
                {"gateway": place},
                f"--gateway must be PORT or HOST:PORT, of a port .*, got '{place}'",
            )
            for place in ("x", "host:", "99999", ":80", "1:2:3")
        ),
        ({"gateway": "0", "algorithm": "sft"}, "--gateway needs a run that samples outputs"),
        *(
            (
                {"peak_tflops": peak},
                f"--peak-tflops must be auto, measure, or a pos.*, got '{peak}'",
            )
            for peak in ("", "fast", "0", "0.0", "-3", "1e3", "nan")
        ),
        ({"samples_per_question": 1}, "--samples-per-question must be at least 2"),
        ({"batch_size": 6, "train_minibatch_size": 4}, r"must divide --batch-size \(6\), got 4"),
        ({"aggregation": "constant"}, "--constant-length-samples goes with"),
        ({"constant_length_samples": 9}, "--constant-length-samples goes with"),
        ({"max_tokens_per_gpu": 512}, r"must exceed --max-generation-tokens \(512\)"),
        ({"deterministic": True, "max_staleness": 1}, "--max-staleness must be 0"),
        ({"max_staleness": 1, "importance_correction": "mask"}, "it would correct twice"),
        (
            {"num_passes": 2, "ratio_mode": "on_policy"},
            "--ratio-mode must not be on_policy with --num-passes above 1: later passes train "
            "samples of a policy that the passes before have left, got 'on_policy'",
        ),
        ({"num_passes": 0}, "--num-passes must be positive"),
        (
            {"num_passes": 2, "algorithm": "sft"},
            "--num-passes needs an algorithm that samples outputs, got 2: raise",
        ),
        ({"ratio_mode": "behaviour", "importance_correction": "truncate"}, "correct twice"),
        ({"ratio_level": "sequence", "aggregation": "token-mean"}, "--ratio-level must be token"),
        ({"ratio_level": "sequence", "policy_loss": "cispo"}, "--ratio-level must be token"),
        ({"dual_clip": 0.5}, r"--dual-clip must be 0 \(off\) or above 1, got 0.5"),
        ({"dual_clip": 3.0, "policy_loss": "cispo"}, "--dual-clip belongs to"),
        (
            {
                "ratio_mode": "decoupled",
                "importance_correction": "mask",
                "correction_low": 1.5,
            },
            "--correction-low must be in",
        ),
        (
            {
                "ratio_mode": "decoupled",
                "importance_correction": "truncate",
                "correction_high": 0.5,
            },
            "--correction-high must be at least 1",
        ),
        (
            {
                "ratio_mode": "decoupled",
                "importance_correction": "mask",
                "correction_high": 1.0,
            },
            "--correction-high must be at least 0.01 away from 1 .*, got 1.0: 2 is usual",
        ),
        (
            {
                "ratio_mode": "decoupled",
                "importance_correction": "mask",
                "correction_low": 0.999,
            },
            "--correction-low must be at least 0.01 away from 1 .*, got 0.999: 0.5 is usual",
        ),
        (
            {"fsdp_sharding_strategy": "ZERO1", "offload": "parameters"},
            "--offload must leave parameters where ZERO1 gathers them, got 'parameters': give",
        ),
        ({"overlong_buffer_tokens": 513}, r"must not exceed --max-generation-tokens \(512\)"),
        ({"num_warmup_samples": 8}, "--num-warmup-samples goes with --schedule-clock samples"),
        ({"num_warmup_steps": 8, "schedule_clock": "samples"}, "--num-warmup-steps goes with"),
        ({"num_warmup_tokens": 8}, "--num-warmup-tokens goes with --schedule-clock tokens"),
        ({"num_schedule_tokens": 8}, "--num-schedule-tokens goes with --schedule-clock tokens"),
        (
            {"schedule_clock": "tokens", "lr_scheduler": "cosine"},
            "--num-schedule-tokens goes with .* these need it",
        ),
        ({"num_warmup_steps": 8, "warmup_ratio": 0.1}, "must not stand beside --num-warmup-steps"),
        ({"warmup_ratio": 0.1, "num_warmup_steps": 8}, "--warmup-ratio must not stand beside"),
        ({"warmup_ratio": 0.1, "lr_scheduler": "constant"}, "--warmup-ratio needs a --lr-sched"),
        ({"warmup_ratio": 10.0}, r"--warmup-ratio must be in \[0, 1\], got 10.0"),
        ({"warmup_ratio": -0.1}, "--warmup-ratio must not be negative"),
        ({"min_learning_rate_ratio": 0.1}, "--min-learning-rate-ratio needs --lr-scheduler linear"),
    ],
)
def test_combinations_that_cannot_work_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        find_algorithm(config(**options))


@pytest.mark.parametrize("peak", ["auto", "measure", "989", "0.05", ".5", "10", "100.25"])
def test_a_peak_is_a_word_or_a_number_above_0(peak):
    assert config(peak_tflops=peak).memory.peak_tflops == peak


def test_a_gateway_is_on_loopback_unless_a_host_is_named():
    assert config(gateway="0").places.gateway_place == ("127.0.0.1", 0)
    assert config(gateway="0.0.0.0:8000").places.gateway_place == ("0.0.0.0", 8000)


def test_a_high_learning_rate_is_taken_from_who_says_so():
    assert config(learning_rate=1e-2).optimizer.learning_rate == 0.01
    assert config(learning_rate=3.0, allow_high_learning_rate=True).optimizer.learning_rate == 3.0


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"max_staleness": 0}, "on_policy"),
        ({"max_staleness": 1}, "behaviour"),
        ({"max_staleness": 0, "batch_size": 8, "train_minibatch_size": 4}, "behaviour"),
        ({"max_staleness": 1, "ratio_mode": "on_policy"}, "on_policy"),
        ({"max_staleness": 0, "num_passes": 2}, "decoupled"),
        ({"max_staleness": 1, "num_passes": 2}, "decoupled"),
        ({"num_passes": 2, "ratio_mode": "behaviour"}, "behaviour"),
    ],
)
def test_the_ratio_mode_follows_from_the_configuration(options, mode):
    assert config(**options).mode == mode


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_preset_makes_a_valid_run_and_prints_what_it_stands_for(name):
    chosen = TrainConfig.from_options({"preset": name, **REQUIRED})
    assert find_algorithm(chosen).aggregation == chosen.objective.aggregation
    named = preset_options(name, max_generation_tokens=chosen.sampling.max_generation_tokens)
    assert {option: chosen.options()[option] for option in named} == named
    words = Grpo(chosen).in_words()[0]
    assert all(f"{flag(option)} {value}" in words for option, value in named.items())


def test_what_is_given_beside_a_preset_wins_and_is_said():
    chosen = TrainConfig.from_options({"preset": "dapo", "clip_high": 0.2, **REQUIRED})
    assert (chosen.objective.clip_high, chosen.objective.aggregation) == (0.2, "token-mean")
    assert "changed by you: --clip-high 0.2" in Grpo(chosen).in_words()[0]


def test_a_divisor_given_without_a_preset_s_aggregation_is_not_inherited():
    chosen = TrainConfig.from_options(
        {"preset": "dr_grpo", "aggregation": "sample-mean", **REQUIRED}
    )
    assert chosen.objective.constant_length_samples == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_staleness": 0}, "ratio: a token, against the policy itself; clipped to [0.8, 1.2], "
         "which is inert"),
        ({"clip_high": 0.3}, "against what the engine recorded; clipped to [0.8, 1.3]"),
        ({}, "correction: none needed, the ratio contains it"),
        ({"ratio_mode": "on_policy"}, "of weights 1 versions old: the gradient is biased"),
        (
            {"ratio_mode": "decoupled", "importance_correction": "mask"},
            "engine/trainer correction: mask(trainer/engine, 0.5, 2) a token",
        ),
        ({"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}, "within [0, 5] (cispo)"),
        ({"dual_clip": 3.0}, "below 3 where the advantage is negative"),
        ({"aggregation": "token-mean"}, "loss: a mean over all tokens of the step"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "0.1 * KL (k1) in the reward"),
        ({"dynamic_sampling": 4}, "replaced up to 4 times"),
    ],
)  # fmt: skip
def test_the_run_says_in_words_what_it_optimises(options, words):
    assert words in "\n".join(Grpo(config(**options)).in_words())


def test_clipping_is_live_where_the_policy_moves_within_a_batch():
    several_steps = {"ratio_mode": "decoupled", "batch_size": 8, "train_minibatch_size": 4}
    assert not Grpo(config(**several_steps)).clip_is_inert
    assert Grpo(config(ratio_mode="decoupled")).clip_is_inert


def test_an_option_that_there_is_not_is_refused_wherever_all_are_given_by_name():
    for make in (config, config().but):
        with pytest.raises(TypeError, match="TrainConfig has no option 'learning_rat'"):
            make(learning_rat=1e-6)
