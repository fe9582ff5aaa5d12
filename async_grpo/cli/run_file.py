"""One TOML file for a run: a table for each command, whose keys are the command's options.

    [cluster]                # what all commands share
    namespace = "mine"

    [[worker]]               # `async-grpo worker`; several tables are several dispatchers
    mode = "generation"
    max_num_seqs = 256

    [train]                  # `async-grpo train`
    nproc_per_node = 2

    [[data]]                 # its --data, one table for each type of questions
    type = "sums"
    path = "sums.jsonl"

    [[eval]]                 # its --eval, one table for each set of held-out questions
    name = "math"
    path = "math.jsonl"
    samples = 8

`--config FILE` makes a command read [cluster] and its own table; the command line goes before the
file. Paths are relative to the folder of the command, as they are on its command line.

Examples and sample data lie in the top folder of a clone, and inside an installed package. A path
below `examples/` or `sample-data/` that does not exist here means the one that came with the
package, so that `async-grpo launch examples/quickstart.toml` works in any folder. A file that lies
elsewhere is a stranger's: the code that it names runs only after the user has given --trust.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from async_grpo.config.data_files import as_text
from async_grpo.config.option import flag, option_fields, split_text
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import as_name

# {our option: what TRL and verl call it}, as the tables of docs/migration.md have them; verl's
# stand behind any dots: actor_rollout_ref.rollout.n. What they have and we have not is under "".
CALLED = {
    "samples_per_question": "num_generations rollout.n",
    "batch_size": "generation_batch_size train_batch_size",
    "max_tokens_per_gpu": "per_device_train_batch_size gradient_accumulation_steps "
        "ppo_max_token_len_per_gpu use_dynamic_bsz ppo_micro_batch_size_per_gpu",
    "num_training_batches": "max_steps num_train_epochs total_epochs total_training_steps",
    "train_minibatch_size": "steps_per_generation ppo_mini_batch_size",
    "max_generation_tokens": "max_completion_length max_response_length",
    "max_prompt_tokens": "max_prompt_length filter_overlong_prompts",
    "aggregation": "loss_type loss_agg_mode",
    "advantage": "scale_rewards adv_estimator norm_adv_by_std_in_grpo",
    "ratio_level": "importance_sampling_level loss_mode", "clip_low": "epsilon clip_ratio_low",
    "clip_high": "epsilon_high clip_ratio_high", "dual_clip": "delta",
    "kl_coefficient": "beta use_kl_loss kl_loss_coef",
    "kl_estimator": "use_bias_correction_kl kl_loss_type use_kl_in_reward",
    "num_batches_per_ref_model_update": "sync_ref_model ref_model_sync_steps",
    "ratio_mode": "vllm_importance_sampling_correction",
    "correction_level": "vllm_importance_sampling_mode",
    "correction_high": "vllm_importance_sampling_clip_max",
    "correction_low": "vllm_importance_sampling_clip_min",
    "mask_truncated_samples": "mask_truncated_completions",
    "entropy_coefficient": "entropy_coef entropy_coeff", "routing_replay": "router_replay.mode",
    "balance_coefficient": "moe_aux_loss_coeff router_aux_loss_coef",
    "lora_rank": "lora_r lora.rank", "lora_alpha": "lora.alpha",
    "lora_targets": "target_modules lora_target_modules", "lora_init": "init_lora_weights",
    "modules_to_save": "lora_modules_to_save",
    "base_quantization": "load_in_4bit load_in_8bit quantization_config",
    "adapter_path": "lora_adapter_path",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "max_model_len": "vllm_max_model_length", "lr_scheduler": "lr_scheduler_type",
    "num_warmup_steps": "warmup_steps", "mixed_precision": "bf16",
    "activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "use_liger_kernel": "use_liger", "fsdp_sharding_strategy": "fsdp fsdp_config",
    "eval": "num_generations_eval", "eval_every_batches": "eval_steps test_freq",
    "checkpoint_every_batches": "save_steps save_freq", "keep_checkpoints": "save_total_limit",
    "resume": "resume_from_checkpoint", "trackers": "report_to logger",
    "push_to_hub": "hub_model_id", "hub_public": "hub_private_repo",
    "dump_samples_filename": "log_completions rollout_data_dir validation_data_dir "
        "log_val_generations", "infinite_sampler_seed": "data_seed seed",
    "data_path": "train_files", "eval_data_path": "val_files", "model_name_or_path": "model.path",
    "output_dir": "default_local_dir", "nproc_per_node": "n_gpus_per_node", "learning_rate": "lr",
    "max_grad_norm": "grad_clip", "importance_correction": "rollout_correction",
    "reward_fns": "custom_reward_function.path custom_reward_function.name",
    "fsdp_shard_ranks": "fsdp_size", "offload": "param_offload optimizer_offload",
    "colocated": "vllm_mode vllm_enable_sleep_mode free_cache_engine",
    "engine_option": "engine_kwargs", "mode": "reward_model.model.path reward_model.enable",
    "num_passes": "num_iterations ppo_epochs",
    "": "top_k min_p repetition_penalty top_entropy_quantile "
        "off_policy_mask_threshold reward_weights max_tool_calling_iterations use_vllm "
        "lora_dropout lora.dropout",
}  # fmt: skip
THEIRS = {name: own for own, names in CALLED.items() for name in names.split()}
SHARED = "cluster"
SHARED_OPTIONS = ("ray_address", "namespace")
OF_TRAIN = {"data": "type", "eval": "name"}  # tables that are options: {table: its first key}
TABLES = (SHARED, "worker", "train", *OF_TRAIN, "plot", "launch")
MAY_REPEAT = ("worker", *OF_TRAIN)
Table = Mapping[str, Any]  # of a run's file

PACKAGE = Path(__file__).parents[1]
PATH = re.compile(r"(?<![\w./-])(?:examples|sample-data)(?:/[\w.-]+)+")
NAMES = ("algorithm", "environment", "mode", "reward_fns", "rewards")  # which may have arguments
COMMANDS = ("prepare", "environment")  # keys whose values are words of a shell
TRUST = "--trust"
trust_option = click.option(
    TRUST, is_flag=True, help="run the code that FILE names, wherever it lies, and unconfined"
)


def read_tables(file: str) -> tuple[Table, dict[str, list[Table]]]:
    """[cluster], and {name of another table: its tables, each with the keys of [cluster] too}."""
    try:
        content = with_shared(tomllib.loads(Path(here_or_shared(file)).read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--config {file} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise click.UsageError(f"--config {file} is no TOML: {error}") from None
    found: dict[str, list[Table]] = {}
    for name, value in content.items():
        tables = value if isinstance(value, list) else [value]
        if not all(isinstance(table, dict) for table in tables):
            remedy = "write [train] or another above it"
            raise click.UsageError(f"{file}: {name} must stand in a table, got {value!r}: {remedy}")
        if name not in TABLES:
            raise _unknown(f"{file}: [{name}]", "is no table of a run", name, TABLES)
        if len(tables) > 1 and name not in MAY_REPEAT:
            repeating = " and ".join(f"[[{each}]]" for each in MAY_REPEAT)
            raise click.UsageError(
                f"{file}: [{name}] must stand once, got {len(tables)}: only {repeating} may repeat"
            )
        try:
            found[name] = [as_typed(table) for table in tables]
        except ConfigError as error:
            raise click.UsageError(f"{file}: [{name}] {error}") from None
    for option, key in OF_TRAIN.items():
        if tables := found.pop(option, []):
            train = found.setdefault("train", [{}])[0]
            if option in train:
                raise click.UsageError(
                    f"{file}: {option} must be in [[{option}]] or in [train]: drop one"
                )
            try:
                texts = [as_text(table, option_name=option, name=key) for table in tables]
            except ConfigError as error:
                raise click.UsageError(f"{file}: {error}") from None
            found["train"] = [{**train, option: texts}]
    [shared] = found.pop(SHARED, [{}])
    for key in shared:
        if key not in SHARED_OPTIONS:
            raise _unknown(f"{file}: [{SHARED}] {key}", "is not shared", key, SHARED_OPTIONS)
    return shared, {name: [{**shared, **each} for each in found[name]] for name in found}


def as_typed(table: Table) -> Table:
    """The table with values that are tables themselves as one types them.

    >>> as_typed({"columns": {"level": "int"}, "environment": {"path": "my.py:Guess", "size": 4}})
    {'columns': 'level=int', 'environment': 'my.py:Guess(size=4)'}
    """
    found = {key: as_name(value) if key in NAMES else value for key, value in table.items()}
    if isinstance(types := found.get("columns"), dict):
        found["columns"] = ",".join(f"{name}={kind}" for name, kind in types.items())
    if isinstance(rewards := found.get("reward_fns"), list):
        found["reward_fns"] = ",".join(map(str, rewards))
    return found


def table_of(
    file: str, *, command: click.Command, mode: object, number: str | None
) -> dict[str, object]:
    """{parameter of `command`: value} of the command's table.

    Its `number`, or else `mode`, chooses among [[worker]] tables.
    """
    name = str(command.name)
    shared, found = read_tables(file)
    tables = found.get(name, [shared])
    if number is not None:
        tables = [tables[int(number)]]
    if len(tables) > 1:
        default = next(p.default for p in command.params if p.name == "mode")
        modes = [table.get("mode", default) for table in tables]
        tables = [table for table, its in zip(tables, modes, strict=True) if its == mode]
        if len(tables) != 1:
            raise click.UsageError(
                f"{file} has {len(modes)} [[worker]] tables: choose one with --mode, of "
                f"{', '.join(modes)}; of one mode there may be one, or use `async-grpo launch`"
            )
    return values_of(tables[0], command=command, where=f"{file}: [{name}]")


def values_of(table: Table, *, command: click.Command, where: str) -> dict[str, object]:
    """{parameter of `command`: value}; raises `click.UsageError` that names what is wrong."""
    known = {key: each for each in command.params if each.expose_value for key in _keys(each)}
    values = {}
    for key, value in table.items():
        parameter = known.get(key.replace("-", "_"))
        if parameter is not None:
            values[str(parameter.name)] = _checked(parameter, value, where=f"{where} {key}")
        elif key not in SHARED_OPTIONS:  # not every command has these
            name, rule = _innermost(key, value), f"is no option of `async-grpo {command.name}`"
            raise _unknown(f"{where} {name}", rule, name, known)
    return values


def config_option(function: Callable[..., object]) -> Callable[..., object]:
    """A decorator that gives a click command `--config`, which `OptionsCommand` reads."""
    return click.option(
        "--config",
        metavar="FILE",
        expose_value=False,
        help="TOML file with this command's options as keys of its table; those typed win",
    )(function)


def _keys(parameter: click.Parameter) -> Iterable[str]:
    """Keys of a parameter in a file: its long names, with underscores."""
    long = [name for name in parameter.opts if name.startswith("--")]
    return [name.removeprefix("--").replace("-", "_") for name in long] or [str(parameter.name)]


def _checked(parameter: click.Parameter, value: object, *, where: str) -> object:
    if parameter.multiple or parameter.nargs == -1:
        if isinstance(value, str) and hasattr(parameter, "group"):  # of a class of options
            value = [value]
        if not isinstance(value, list):
            raise click.UsageError(f"{where} must be a list, got {value!r}: write [{value!r}]")
        return [_converted(parameter, each, where=where) for each in value]
    return _converted(parameter, value, where=where)


def _converted(parameter: click.Parameter, value: object, *, where: str) -> object:
    kind = getattr(parameter.type, "parsed_as", parameter.type)  # of one that may be None
    if getattr(parameter, "is_flag", False):
        wanted, fits = "true or false", isinstance(value, bool)
    elif isinstance(kind, click.types.IntParamType):
        wanted, fits = "an integer", isinstance(value, int) and not isinstance(value, bool)
    elif isinstance(kind, click.types.FloatParamType):
        wanted, fits = "a number", isinstance(value, int | float) and not isinstance(value, bool)
    else:
        wanted, fits = "a text", isinstance(value, str)
    if not fits:
        remedy = 'write text as "text", numbers and true or false without quotes'
        raise click.UsageError(f"{where} must be {wanted}, got {value!r}: {remedy}")
    try:
        return parameter.type.convert(value, parameter, None)
    except click.BadParameter as error:
        raise click.UsageError(f"{where}: {error.message}") from None


def _unknown(what: str, rule: str, name: str, known: Iterable[str]) -> click.UsageError:
    known = [*known]
    own = same_here(name)
    if own is not None and own not in known:
        return click.UsageError(f"{what} {rule}, {told_of(own)}")
    nearest = own or difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return click.UsageError(f"{what} {rule}, the nearest is {nearest}: correct or remove it")


def same_here(name: str) -> str | None:
    """Our option for a name of TRL's or verl's; empty: there is none, None: the name is not known.

    >>> same_here("actor_rollout_ref.rollout.n"), same_here("--top-k"), same_here("size")
    ('samples_per_question', '', None)
    """
    parts = name.strip("-+").replace("-", "_").split(".")
    ends = (".".join(parts[number:]) for number in range(len(parts)))
    return next((THEIRS[end] for end in ends if end in THEIRS), None)


def told_of(own: str) -> str:
    """What stands here for an option of others that is not spelled so, half a sentence.

    >>> told_of("max_model_len")
    'here it is --max-model-len of `async-grpo worker`: give that, or remove it'
    """
    if not own:
        return "there is no such option here: remove it (docs/migration.md says why)"
    command = "worker" if own in option_fields(WorkerConfig) else "train"
    return f"here it is {flag(own)} of `async-grpo {command}`: give that, or remove it"


def _innermost(name: str, value: object) -> str:
    """The dotted name of the first value in tables of tables, as TOML reads `a.b.c = 1`."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name


def as_toml(tables: Mapping[str, Sequence[Table]]) -> str:
    """The text of a run's file with these tables.

    >>> print(as_toml({"train": [{"data_path": "a", "deterministic": True, "adam_epsilon": 1e-8}]}))
    [train]
    data_path = "a"
    deterministic = true
    adam_epsilon = 1e-08
    <BLANKLINE>
    """
    blocks = []
    for name, repeated in tables.items():
        head = f"[[{name}]]" if name in MAY_REPEAT else f"[{name}]"
        for table in repeated:
            lines = [f"{key} = {_literal(value)}" for key, value in table.items()]
            blocks.append("\n".join([head, *lines]) + "\n")
    return "\n".join(blocks)


def values_in(config: Any) -> dict[str, object]:
    """{option: value as a run's file has it} of the trainer's or a worker's options."""
    values = config.options()
    for name, each in option_fields(type(config)).items():
        if several := each.metadata["several"]:
            values[name] = split_text(values[name], several.between)
    return values


def _literal(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{_literal(key)} = {_literal(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def shared_folder() -> Path:
    """Where the examples and the sample data lie."""
    installed = PACKAGE / "share"
    return installed if installed.is_dir() else PACKAGE.parent


def here_or_shared(path: str) -> str:
    """The path as it is, or in the package if it exists only there.

    >>> here_or_shared("runs/mine.toml"), Path(here_or_shared("examples/quickstart.toml")).is_file()
    ('runs/mine.toml', True)
    """
    shared = shared_folder() / path
    is_shared = PATH.fullmatch(path) and not Path(path).exists() and shared.exists()
    return str(shared) if is_shared else path


def with_shared(value: object, *, key: str = "") -> Any:
    """The content of a run's file, or a part, with `here_or_shared` applied to paths in it.

    >>> with_shared({"train": {"batch_size": 4, "data": ["a=sample-data/none.jsonl"]}})
    {'train': {'batch_size': 4, 'data': ['a=sample-data/none.jsonl']}}
    """
    if isinstance(value, dict):
        return {name: with_shared(each, key=name) for name, each in value.items()}
    if isinstance(value, list):
        return [with_shared(each, key=key) for each in value]
    if not isinstance(value, str):
        return value
    quoted = shlex.quote if key in COMMANDS else str
    return PATH.sub(lambda match: quoted(here_or_shared(match[0])), value)


def is_near(file: str) -> bool:
    """Whether a file lies in this folder, or came with the package."""
    place = Path(here_or_shared(file)).resolve()
    near = (Path.cwd(), PACKAGE, shared_folder() / "examples")
    return any(place.is_relative_to(folder.resolve()) for folder in near)
