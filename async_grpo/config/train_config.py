"""Every option of `trainer_core.py`, validated before torch or Ray is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from async_grpo.config.data_files import DataFile, DataSource, parse_columns, parse_data_files
from async_grpo.config.evaluation_sets import (
    UNNAMED,
    EvaluationConfig,
    EvaluationSet,
    check_best,
)
from async_grpo.config.objective import check_schedule, with_preset
from async_grpo.config.option import (
    LOG_LEVELS,
    POSITIVE,
    Change,
    flag,
    names_in,
    option,
    require,
    required,
)
from async_grpo.util import deadlines

MAX_LEARNING_RATE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(EvaluationConfig):
    """Options of the trainer, the most usual first; those of the update are inherited."""

    model_name_or_path: str = required(group="Usual options")
    """Hugging Face folder of a causal language model, or its name on a hub"""
    data_path: str = option("", change=Change.PLACE)
    """JSONL file, or anything datasets.load_dataset reads; several: --data"""
    eval_data_path: str = option("", none="")
    """held-out data, graded (sft: its loss) before, during and after training; more: --eval"""
    output_dir: str = option("runs/latest", change=Change.PLACE)
    """folder for metrics, samples and exports"""
    num_training_batches: int = option(100, must=POSITIVE)
    """batches to train"""
    batch_size: int = option(32, must=POSITIVE, change=Change.FIXED)
    """questions (sft: pairs) a batch; weights are published once each"""
    samples_per_question: int = option(8, must=POSITIVE, change=Change.FIXED)
    """outputs sampled for each question"""
    max_generation_tokens: int = option(512, must=POSITIVE)
    """longest output in tokens"""
    learning_rate: float = option(1e-6, change=Change.LIVE)
    """peak learning rate of AdamW"""
    max_tokens_per_gpu: int = option(16384, must=POSITIVE)
    """prompt + output tokens of one rank's minibatch"""

    algorithm: str = option(
        "grpo", aliases=("objective",), group="The run and its data", change=Change.FIXED
    )
    """grpo, sft on prompt and completion pairs or on plain text, or your own: package.module:Name,
    path/to/file.py:Name"""
    environment: str = option("single_turn", change=Change.FIXED)
    """how questions are played: single_turn, or on workers of --mode environment: your own,
    package.module:Name, path/to/file.py:Name; an agent of OpenAI's protocol, agent:COMMAND; a
    taskset of verifiers, "verifiers:PYTHON TASKSET"; or an OpenEnv server, openenv:URL"""
    judges: str = option("", change=Change.FIXED)
    """comma-separated names of the judges that environments ask: workers of --mode judge"""
    renderer: str = option("auto", change=Change.FIXED)
    """how environments write messages as tokens: auto; template, by the model's chat template; or
    a family of models of the package renderers"""
    gateway: str = option("", none="", change=Change.INCIDENTAL)
    """PORT, or HOST:PORT, of a gateway on the policy while it is trained, in OpenAI's protocol: on
    loopback unless HOST says otherwise; 0: any free port; empty: none"""
    resume: str = option("auto", change=Change.PLACE | Change.INCIDENTAL)
    """auto: go on from the newest good checkpoint of the output folder, if there is one; never; or
    the folder of a checkpoint, or of a run"""
    overwrite: bool = option(False, change=Change.PLACE | Change.INCIDENTAL)
    """replace the run that the output folder holds"""
    model_revision: str = option("", none="", change=Change.PLACE)
    """branch, tag or commit of a model on a hub; empty: its main branch"""
    data: str = option("", several=";", change=Change.FIXED)
    """TYPE=PATH,key=value,...: a data file in the place of --data-path, whose questions are of that
    dataset_type; give it once for each type. Keys: weight of its share of every batch (1),
    environment, rewards (names with + between), teacher, eval_path, split, config, columns (types),
    and names of columns as input=question"""
    data_split: str = option("train")
    """split of a datasets.load_dataset source"""
    data_config: str = option("")
    """configuration of a datasets.load_dataset source that has several, such as main"""
    column_mapping: str = option("")
    """our=yours pairs for other column names, such as input=question,answer=solution"""
    columns: str = option("")
    """column=type pairs for values to convert, such as level=int,share=float; or bool, str. In CSV
    all else is text"""
    infinite_sampler_seed: int = option(37, must="", change=Change.FIXED)
    """seed of the endless permutation of the questions"""

    train_minibatch_size: int = option(0, group="Batches and sampling", change=Change.FIXED)
    """questions a gradient step, a divisor of --batch-size; 0: the whole batch"""
    temperature: float = option(1.0)
    """sampling temperature, also of every log-probability"""
    max_staleness: int = option(1, change=Change.FIXED | Change.LIVE)
    """batches that generation may run ahead of published weights; 0: strictly on-policy"""
    num_batches_per_ref_model_update: int = option(1_000_000, must=POSITIVE, change=Change.FIXED)
    """batches between updates of the reference model with the policy's weights"""
    deterministic: bool = option(False)
    """form rounds in ordinal order from complete steps; needs --max-staleness 0"""

    lr_scheduler: str = option(
        "constant_with_warmup",
        choices=("constant", "constant_with_warmup", "linear", "cosine"),
        group="Learning rate and optimizer",
    )
    """learning-rate schedule"""
    schedule_clock: str = option("steps", choices=("steps", "samples"))
    """what the schedule counts: gradient steps taken, or the samples trained in them"""
    num_warmup_steps: int = option(0)
    """gradient steps of linear warm-up"""
    num_warmup_samples: int = option(0)
    """samples of linear warm-up, for --schedule-clock samples"""
    warmup_ratio: float = option(0.0)
    """linear warm-up as a share of the planned steps or samples, instead of a number"""
    min_learning_rate_ratio: float = option(0.0)
    """share of --learning-rate at which linear and cosine end"""
    adam_beta1: float = option(0.9)
    """first moment decay of AdamW"""
    adam_beta2: float = option(0.95)
    """second moment decay of AdamW"""
    adam_epsilon: float = option(1e-8, must=POSITIVE)
    """epsilon of AdamW"""
    weight_decay: float = option(0.0)
    """decoupled weight decay of AdamW"""
    max_grad_norm: float = option(1.0)
    """clip of the global gradient norm; 0: no clipping"""
    allow_high_learning_rate: bool = option(False, change=Change.INCIDENTAL)
    """take a --learning-rate above 0.01 as meant"""

    loss_chunksize: int = option(1024, none=0, group="Memory and speed")
    """tokens whose logits exist at a time; 0: those of a whole minibatch"""
    mixed_precision: str = option("auto", choices=("auto", "no", "bf16"))
    """compute type; master weights are float32"""
    attention: str = option("auto", choices=("auto", "packed", "flash_attention_2"))
    """kernel of attention over packed rows: auto is packed, torch's own, by FlashAttention-3 where
    that is installed; flash_attention_2 needs flash-attn; each is checked before training"""
    fsdp_sharding_strategy: str = option(
        "FULL_SHARD", choices=("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
    )
    """FULL_SHARD gathers a layer's weights for its forward and again for its backward pass,
    SHARD_GRAD_OP keeps them in between: faster, in more memory; HYBRID_SHARD does as FULL_SHARD
    within groups of ranks, each of which has all of the model: gathers stay within a machine"""
    fsdp_shard_ranks: int = option(0)
    """ranks of a group of HYBRID_SHARD; 0: those of a machine"""
    offload: str = option("none", choices=("none", "optimizer", "parameters"))
    """what lies in the host's memory: AdamW's moments, which steps there (on a device 8 bytes less
    for each parameter of its shard); or parameters and gradients too (16 bytes); slower"""
    activation_checkpointing: str = option(
        "auto", choices=("auto", "on", "off"), bare="on", none="off"
    )
    """recompute activations in the backward pass; auto: where the bill of memory, which is logged
    at the start, exceeds what is free without it"""
    use_torch_compile: bool = option(False)
    """compile decoder layers and log-probabilities"""
    defer_gradient_sync: bool = option(False)
    """reduce gradients over ranks once a step instead of once a minibatch; costs a whole gradient
    in memory on each rank"""
    gpus_per_rank: float = option(1.0, must=POSITIVE, change=Change.INCIDENTAL)
    """share of a device, and of its memory, that a rank takes: below 1 workers may use the rest"""
    peak_tflops: str = option("auto", change=Change.INCIDENTAL)
    """TFLOP/s that a rank's device could do, by which mfu is told; measure: by products as the run
    starts; auto: measured on a device, and no mfu on a CPU"""
    weight_transport: str = option("object_store", choices=("object_store", "nccl"))
    """how weights travel to generation workers: Ray's object store, or NCCL between NVIDIA
    devices"""
    weight_delta: bool = option(False, change=Change.INCIDENTAL)
    """send workers only the numbers that changed since the weights they have, where these are few,
    as in bfloat16 at a learning rate of 1e-6; costs a copy of the weights in host memory, shared
    by the ranks, and one in each worker"""

    min_samples_per_checkpoint: int = option(0, group="What the run writes")
    """samples trained between exports to hf_format/; 0: only at the end"""
    checkpoint_every_batches: int = option(50)
    """batches between checkpoints that the run can go on from, and one at the end; 0: none"""
    checkpoint_every_minutes: float = option(15.0, change=Change.INCIDENTAL)
    """minutes after which the batch that ends is saved, too; 0: by batches only"""
    keep_checkpoints: int = option(2, must=POSITIVE, change=Change.INCIDENTAL)
    """checkpoints kept, the newest ones"""
    dump_samples_filename: str = option("samples.jsonl", none="")
    """file for every trained sample: a name in the output folder, or a path; empty: none"""
    dump_token_columns: bool = option(False, change=Change.INCIDENTAL)
    """also dump token ids, masks and log-probabilities, about 90 bytes an output token"""
    dump_max_gib: float = option(4.0, change=Change.INCIDENTAL)
    """room for dumped samples in GiB, in four files: the oldest goes for a new one; 0: no limit"""
    replay_max_gib: float = option(4.0, change=Change.INCIDENTAL)
    """room in GiB, of all ranks, for what each minibatch held and came to, by which async-grpo
    replay trains a batch again: the oldest batches go for new ones; 0: none is kept"""
    trackers: str = option(
        "tensorboard", none="", several=",", aliases=("tracker",), change=Change.INCIDENTAL
    )
    """where metrics go beside the files: tensorboard, wandb, mlflow, trackio, or another that
    accelerate can talk to; once for each, or with commas between them; empty: nowhere"""
    tracker_project: str = option("async-grpo", change=Change.INCIDENTAL)
    """project, or experiment, of the run in trackers"""
    run_name: str = option("", change=Change.INCIDENTAL)
    """name of the run in trackers; empty: that of the output folder"""
    logging_level: str = option("INFO", choices=LOG_LEVELS, change=Change.INCIDENTAL)
    """log detail"""

    ray_address: str = option("auto", group="Ray cluster", change=Change.INCIDENTAL)
    """host:port of the Ray cluster; auto: the one on this machine"""
    namespace: str = option("async-grpo")
    """Ray namespace that the run's actors share"""
    worker_timeout_s: float = option(1800.0, must=POSITIVE, change=Change.INCIDENTAL)
    """seconds to wait for the workers that the run needs, which may be loading a large model"""
    stall_timeout_s: float = option(900.0, change=Change.INCIDENTAL)
    """seconds without progress after which a request is tried again elsewhere, and without any in
    the whole run, after which it ends; tokens are progress: no output takes too long"""
    generation_timeout_s: float = option(0.0)
    """seconds after which a group's outputs are dropped, which favours short ones; 0: never"""
    turn_timeout_s: float = option(0.0)
    """seconds that a turn may take in an environment, with its wait for an engine, before its group
    is dropped, which favours short ones; 0: any number"""
    episode_timeout_s: float = option(0.0)
    """the same of a whole episode"""

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Self:
        """The options that were given, over those of the preset that they name."""
        longest = cls(**given).max_generation_tokens
        return cls(**with_preset(given, max_generation_tokens=longest))

    def __post_init__(self) -> None:
        self.check_numbers()
        if bool(self.data_path) == bool(parse_data_files(self.data)):
            rule = "must be given, or --data for each of several files, and not both"
            raise self.refusal("data_path", rule, "name one file, or all with their types")
        if parse_columns(self.columns) and not (self.data_path or self.eval_data_path):
            rule = "must be said in each --data"
            raise self.refusal("columns", rule, "write --data NAME=PATH,columns='level=int'")
        if self.fsdp_shard_ranks and self.fsdp_sharding_strategy != "HYBRID_SHARD":
            raise self.refusal(
                "fsdp_shard_ranks",
                "needs --fsdp-sharding-strategy HYBRID_SHARD, else all ranks are one group",
                "give that too, or leave it out",
            )
        if self.learning_rate > MAX_LEARNING_RATE and not self.allow_high_learning_rate:
            raise self.refusal(
                "learning_rate",
                f"must be at most {MAX_LEARNING_RATE:g}, "
                "3 was seen to destroy the policy in one step",
                "1e-6 to 1e-5 is usual (1e-6, not 1); "
                "--allow-high-learning-rate takes it all the same",
            )
        if self.gpus_per_rank > 1:
            raise self.refusal(
                "gpus_per_rank", "must be at most 1", "--nproc-per-node takes more devices"
            )
        if not re.fullmatch(r"auto|measure|\d*[1-9]\d*(\.\d+)?|\d*\.\d*[1-9]\d*", self.peak_tflops):
            rule = "must be auto, measure, or a positive number of TFLOP/s"
            raise self.refusal("peak_tflops", rule, "989 is that of an H100 in bf16")
        if self.stall_timeout_s < deadlines.LEAST_STALL_S:
            raise self.refusal(
                "stall_timeout_s",
                f"must be at least {deadlines.LEAST_STALL_S:g}, workers tell of their tokens "
                f"every {deadlines.PING_S:g} s",
                "900 is usual",
            )
        is_place = re.fullmatch(r"([\w.-]+:)?\d{1,5}", self.gateway)
        if self.gateway and not (is_place and self.gateway_place[1] < 1 << 16):
            rule = "must be PORT or HOST:PORT, of a port below 65536"
            raise self.refusal("gateway", rule, "8000 is usual, and 0 takes any free port")
        check_schedule(self)
        for found in self.named_sets:
            rule, remedy = "must not name a set as a type of --data", "name it otherwise"
            require(found.name not in self.types, "eval", rule, found.name, remedy)
            rule, remedy = f"of {found.name} must have a type of --data", ", ".join(self.types)
            is_known = not found.type or not self.types or found.type in self.types
            require(is_known, "eval", rule, found.type, f"choose from {remedy}")
        if self.best_set and not self.checkpoint_every_batches:
            raise self.refusal(
                "checkpoint_every_batches", "must be positive with --keep-best-checkpoint",
                "leave it out: what is evaluated is saved anyway",
            )  # fmt: skip
        if self.batch_size % self.questions_per_step:
            raise self.refusal(
                "train_minibatch_size",
                f"counts questions and must divide --batch-size ({self.batch_size})",
                "choose a divisor, or 0 for one gradient step a batch",
            )

    @property
    def shard_ranks(self) -> int | None:
        """How many share one copy of the model; 0: all ranks; None: those of a machine."""
        if self.fsdp_sharding_strategy != "HYBRID_SHARD":
            return 0
        return self.fsdp_shard_ranks or None

    @property
    def timeouts(self) -> str:
        """Those that drop what takes long, as they were given."""
        names = ("generation_timeout_s", "turn_timeout_s", "episode_timeout_s")
        given = {name: getattr(self, name) for name in names if getattr(self, name)}
        return ", ".join(f"{flag(name)} {seconds:g}" for name, seconds in given.items())

    def check_sampling(self) -> None:
        """Raise `ConfigError` for options with which questions cannot be sampled to learn."""
        for name in ("turn_timeout_s", "episode_timeout_s"):
            if getattr(self, name) and self.environments == {"single_turn"}:
                raise self.refusal(
                    name, "needs an --environment of turns", "--generation-timeout-s limits outputs"
                )
        if not self.temperature:
            raise self.refusal(
                "temperature",
                "must be positive for training",
                "at 0 every sample of a group is the same and nothing is learnt; 1.0 is usual",
            )
        if self.samples_per_question < 2 and self.reward_coefficient:
            raise self.refusal(
                "samples_per_question", "must be at least 2, a group needs a baseline", "8 is usual"
            )
        if self.max_generation_tokens >= self.max_tokens_per_gpu:
            raise self.refusal(
                "max_tokens_per_gpu",
                f"must exceed --max-generation-tokens ({self.max_generation_tokens}) plus a prompt",
                "raise it or lower --max-generation-tokens",
            )
        if self.deterministic and self.max_staleness:
            raise self.refusal(
                "max_staleness", "must be 0 with --deterministic", "drop one of the two"
            )

    @property
    def data_files(self) -> tuple[DataFile, ...]:
        """What is trained on: a file of each type, or one whose lines say their type, if any."""
        types = parse_columns(self.columns)
        source = DataSource(self.data_path, self.data_split, self.data_config, types)
        return parse_data_files(self.data) or (DataFile(source=source),)

    @property
    def data_paths(self) -> str:
        """Of the questions, for messages."""
        return ", ".join(file.source.path for file in self.data_files)

    @property
    def types(self) -> tuple[str, ...]:
        """Of the questions, where each has a file."""
        return tuple(file.type for file in parse_data_files(self.data))

    def file_of(self, dataset_type: str) -> DataFile:
        """The file that holds the questions of a type."""
        return next(each for each in self.data_files if each.type in ("", dataset_type))

    def rewards_of(self, dataset_type: str) -> tuple[str, ...]:
        """The rewards that grade the questions of a type; none: all that the verifiers have."""
        return self.file_of(dataset_type).rewards

    def environment_of(self, dataset_type: str) -> str:
        """The name of the environment that plays the questions of a type."""
        return self.file_of(dataset_type).environment or self.environment

    @property
    def environments(self) -> set[str]:
        """Names of those that play any question."""
        of_sets = {each.environment for each in self.named_sets if each.environment}
        return of_sets | {file.environment or self.environment for file in self.data_files}

    @property
    def judge_names(self) -> tuple[str, ...]:
        """Of --judges."""
        return names_in(self.judges)

    @property
    def gateway_place(self) -> tuple[str, int]:
        """Host and port of --gateway, where it is given."""
        host, _, port = self.gateway.rpartition(":")
        return host or "127.0.0.1", int(port)

    @property
    def file_teachers(self) -> dict[str, str]:
        """See `DistillationConfig`."""
        return {file.type: file.teacher for file in self.data_files if file.teacher}

    @property
    def held_out(self) -> DataSource | None:
        """What is evaluated on, beside the held-out file of each type."""
        if not self.eval_data_path:
            return None
        is_same = self.eval_data_path == self.data_path
        config = self.eval_data_config or (self.data_config if is_same else "")
        split, types = self.eval_data_split or self.data_split, parse_columns(self.columns)
        return DataSource(self.eval_data_path, split, config, types)

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """All that is evaluated on, in the order in which it is."""
        is_unnamed = self.eval_data_path or any(file.held_out for file in self.data_files)
        return (*((EvaluationSet(name=UNNAMED),) if is_unnamed else ()), *self.named_sets)

    @property
    def has_held_out(self) -> bool:
        """Whether anything is evaluated on."""
        return bool(self.evaluation_sets)

    @property
    def best_set(self) -> EvaluationSet | None:
        """The set that tells which checkpoint is the best."""
        name = self.keep_best_checkpoint
        return check_best(name, self.evaluation_sets) if name else None

    def evaluates(self, found: EvaluationSet, num_batches: int) -> bool:
        """Whether a set is due after `num_batches` batches: by its interval, first and last."""
        interval = self.eval_every_batches if found.every is None else found.every
        is_end = num_batches in (0, self.num_training_batches)
        return is_end or bool(interval and num_batches % interval == 0)

    @property
    def pairs(self) -> DataSource | None:
        """What is trained beside sampled outputs, of the split that is trained on."""
        return DataSource(self.pairs_path, self.data_split) if self.pairs_path else None

    @property
    def asks_questions(self) -> bool:
        """Whether anything is sampled: with --gkd-lambda 0 only held-out questions are."""
        return self.gkd_lambda > 0 or self.has_held_out

    @property
    def questions_per_step(self) -> int:
        """Questions a gradient step: M of the design."""
        return self.train_minibatch_size or self.batch_size

    def reference_of(self, batch: int) -> int:
        """Return the version of the moving reference, in batches, that scores a batch."""
        period = self.num_batches_per_ref_model_update
        return max(0, batch - self.max_staleness) // period * period

    @property
    def chunk_size(self) -> int:
        """Tokens whose logits exist at a time."""
        return self.loss_chunksize or self.max_tokens_per_gpu

    @property
    def steps_per_batch(self) -> int:
        return self.batch_size // self.questions_per_step

    @property
    def mode(self) -> str:
        """`on_policy`, `behaviour` or `decoupled`: the ratio's denominator (design, section 4).

        A matter of configuration alone: a measured lag never changes the objective.
        """
        if self.ratio_mode != "auto":
            return self.ratio_mode
        on_policy = self.max_staleness == 0 and self.steps_per_batch == 1
        return "on_policy" if on_policy else "behaviour"

    @property
    def shown_name(self) -> str:
        """What the run is called in trackers."""
        return self.run_name or os.path.basename(os.path.abspath(self.output_dir))

    @property
    def tracker_names(self) -> tuple[str, ...]:
        return names_in(self.trackers)
