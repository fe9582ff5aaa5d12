"""What `accelerate launch` exports means here what it means there, or is refused by name.

The variables are those of its own launchers, from its own files; ranks of theirs start in
tests/integration/test_accelerate_launch.py.
"""

import os
import sys

import pytest
import yaml
from accelerate.commands import launch as launcher
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from click.testing import CliRunner

from async_grpo.cli import train
from async_grpo.cli.options import options_of_launcher
from async_grpo.cli.train import config_of
from async_grpo.util.errors import ConfigError

MODEL_AND_DATA = ("--model-name-or-path", "m", "--data-path", "d")
DEFAULTS = {
    "mixed_precision": "no",
    "use_torch_compile": False,
    "offload": "none",
    "activation_checkpointing": "off",
    "fsdp_sharding_strategy": "FULL_SHARD",
}


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """exported(flags, **fsdp_config): the variables that `accelerate launch` gives a script."""

    def exported(flags="--use_fsdp --num_processes 2", *, rank=True, config=None, **fsdp_config):
        file = tmp_path / "accelerate.yaml"
        whole = {"distributed_type": "FSDP", "num_machines": 1, "num_processes": 2}
        file.write_text(yaml.safe_dump(whole | (config or {}) | {"fsdp_config": fsdp_config}))
        typed = [*flags.split(), "--config_file", str(file), "trainer_core.py"]
        monkeypatch.setattr(sys, "argv", ["accelerate", "launch", *typed])  # it looks there
        args, *_ = launcher._validate_launch_command(
            launcher.launch_command_parser().parse_args(typed)
        )
        for name in [name for name in os.environ if name.startswith("FSDP_")]:
            monkeypatch.delenv(name)
        if rank:
            return prepare_multi_gpu_env(args) | {"RANK": "0"}
        return prepare_simple_launcher_cmd_env(args)[1]

    return exported


def test_without_accelerate_nothing_is_set():
    assert options_of_launcher({"RANK": "0", "FSDP_OFFLOAD_PARAMS": "true"}, {}) == {}


def test_its_defaults_count_where_nothing_is_given(exported):
    assert options_of_launcher(exported(), {}) == DEFAULTS


@pytest.mark.parametrize(
    ("keys", "meant"),
    [
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
        ({"fsdp_sharding_strategy": 2}, {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
        ({"fsdp_sharding_strategy": "hybrid_shard"}, {"fsdp_sharding_strategy": "HYBRID_SHARD"}),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, {"fsdp_sharding_strategy": "NO_SHARD"}),
        ({"fsdp_offload_params": True}, {"offload": "parameters"}),
        ({"fsdp_activation_checkpointing": True}, {"activation_checkpointing": "on"}),
        (
            {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
            {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
        ),
        # FSDP2 of accelerate takes no strategy: it looks at the other key alone.
        ({"fsdp_version": 2, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {}),
        # What is so here in any case.
        (
            {
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "Qwen2DecoderLayer,GPT2Block",
                "fsdp_reshard_after_forward": "FULL_SHARD",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_backward_prefetch": "BACKWARD_PRE",
                "fsdp_forward_prefetch": False,
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_sync_module_states": True,
                "fsdp_use_orig_params": True,
            },
            {},
        ),
    ],
)
def test_keys_of_its_file_are_options_here(keys, meant, exported):
    assert options_of_launcher(exported(**keys), {}) == DEFAULTS | meant


def test_what_is_not_of_fsdp_counts_too(exported):
    environ = exported(config={"mixed_precision": "bf16"})
    assert options_of_launcher(environ, {}) == DEFAULTS | {"mixed_precision": "bf16"}
    compiled = exported("--use_fsdp --num_processes 2 --dynamo_backend inductor")
    assert options_of_launcher(compiled, {}) == DEFAULTS | {"use_torch_compile": True}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"fsdp_state_dict_type": "FULL_STATE_DICT"},
            "fsdp_state_dict_type must be sharded_state_dict, got FULL_STATE_DICT: give that, "
            "only exports in hf_format are whole",
        ),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, "fsdp_sharding_strategy must be "),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy must be transformer"),
        # As `accelerate config` writes it for FSDP1, where `accelerate launch` does not look.
        (
            {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
            "fsdp_reshard_after_forward must not be set, got shard_grad_op: give fsdp_sharding",
        ),
        (
            {"fsdp_transformer_layer_cls_to_wrap": "Qwen2Attention"},
            "fsdp_transformer_layer_cls_to_wrap must not be set, got Qwen2Attention: leave it out",
        ),
        (
            {"fsdp_backward_prefetch": "BACKWARD_POST"},
            "fsdp_backward_prefetch must be backward_pre",
        ),
        ({"fsdp_forward_prefetch": True}, "fsdp_forward_prefetch must be false, got true: leave"),
        ({"fsdp_ignored_modules": "lm_head"}, "fsdp_ignored_modules must not be set, got lm_head"),
        (
            {"fsdp_version": 2, "fsdp_activation_checkpointing_offload": True},
            "fsdp_activation_checkpointing_offload must be false, got true: leave it out",
        ),
    ],
)
def test_keys_that_mean_nothing_here_are_refused_by_name(keys, sentence, exported):
    with pytest.raises(ConfigError, match="^accelerate's " + sentence):
        options_of_launcher(exported(**keys), {})


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision must be no or bf16, got fp16"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "use_deepspeed must be false, got true: give --use"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "use_megatron_lm must be false, got true"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "use_parallelism_config must be false"),
        ({"ACCELERATE_DYNAMO_BACKEND": "ONNXRT"}, "dynamo_backend must be no or inductor"),
        ({"ACCELERATE_CPU_AFFINITY": "1"}, "cpu_affinity must be 0, got 1: leave it out, and"),
        ({"FSDP_VERSION": "3"}, "fsdp_version must be 1 or 2, got 3: give 2"),
    ],
)
def test_what_else_its_launcher_may_ask_for_is_refused_by_name(variables, sentence, exported):
    with pytest.raises(ConfigError, match="^accelerate's " + sentence):
        options_of_launcher(exported() | variables, {})


def test_an_option_given_here_precedes_its_default_and_must_not_contradict_its_key(exported):
    given = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": "auto"}
    left = {name: value for name, value in DEFAULTS.items() if name not in given}
    assert options_of_launcher(exported(), given) == left
    same = exported(fsdp_sharding_strategy="SHARD_GRAD_OP")
    assert options_of_launcher(same, given) == left
    sentence = (
        "accelerate's fsdp_sharding_strategy must be SHARD_GRAD_OP, got HYBRID_SHARD: leave it "
        "out, or --fsdp-sharding-strategy SHARD_GRAD_OP"
    )
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        options_of_launcher(exported(fsdp_sharding_strategy="HYBRID_SHARD"), given)
    with pytest.raises(ConfigError, match="fsdp_activation_checkpointing must be auto, got true"):
        options_of_launcher(exported(fsdp_activation_checkpointing=True), given)


def test_one_process_in_place_of_several_is_refused(exported):
    alone = {"num_processes": 1}
    one = exported("", rank=False, config=alone | {"distributed_type": "NO"})
    assert options_of_launcher(one, {}) == {"mixed_precision": "no", "use_torch_compile": False}
    several = exported("--num_processes 2", rank=False, config={"distributed_type": "NO"})
    with pytest.raises(ConfigError, match="without --use_fsdp or --multi_gpu it has started a sin"):
        options_of_launcher(several, {})


def test_a_run_has_the_options_that_its_launcher_sets(exported, monkeypatch):
    for name, value in exported(fsdp_sharding_strategy="SHARD_GRAD_OP").items():
        monkeypatch.setenv(name, value)
    typed = [*MODEL_AND_DATA, "--activation-checkpointing", "auto"]
    memory = config_of(train.main.make_context("train", typed)).memory
    assert memory.fsdp_sharding_strategy == "SHARD_GRAD_OP"
    assert (memory.mixed_precision, memory.activation_checkpointing) == ("no", "auto")


def test_the_refusal_is_the_one_sentence_that_a_user_reads(exported, monkeypatch):
    environ = exported("--num_processes 2", rank=False, config={"distributed_type": "NO"})
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(train.main, MODEL_AND_DATA)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: accelerate launch must start a process for each of its")


def test_libraries_load_models_as_under_torchrun(exported):
    environ = exported() | {"ACCELERATE_USE_CPU": "True"}
    train._take_from_accelerate(environ)
    assert "ACCELERATE_USE_FSDP" not in environ  # else ranks but the first would load nothing
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
