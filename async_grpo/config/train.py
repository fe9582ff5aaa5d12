"""Every option of `trainer_core.py`, validated before torch or Ray is imported."""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config.option import option, require, required

POSITIVE = (
    "batch_size",
    "samples_per_question",
    "max_generation_tokens",
    "max_tokens_per_gpu",
    "loss_chunksize",
    "num_training_batches",
    "learning_rate",
    "adam_epsilon",
    "num_batches_per_ref_model_update",
    "worker_timeout_s",
    "stall_timeout_s",
)
NOT_NEGATIVE = (
    "train_minibatch_size",
    "max_staleness",
    "kl_coefficient",
    "clip_low",
    "clip_high",
    "constant_length_samples",
    "num_warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "min_samples_per_checkpoint",
    "eval_every_batches",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Options of the trainer, in the order of the data's path."""

    model_name_or_path: str = required("Hugging Face folder of a causal language model")
    data_path: str = required("JSONL file, or anything datasets.load_dataset reads")
    output_dir: str = option("runs/latest", "folder for metrics, samples and exports")
    overwrite: bool = option(False, "replace the run that the output folder holds")
    objective: str = option(
        "grpo", "grpo, or sft on prompt and completion pairs", choices=("grpo", "sft")
    )

    data_split: str = option("train", "split of a datasets.load_dataset source")
    column_mapping: str = option(
        "", "our=yours pairs for other column names, such as input=question,answer=solution"
    )
    infinite_sampler_seed: int = option(37, "seed of the endless permutation of the questions")
    eval_data_path: str = option("", "held-out questions, graded before, during and after training")
    eval_every_batches: int = option(0, "batches between evaluations; 0: only first and last")

    batch_size: int = option(32, "questions (sft: pairs) a batch; weights are published once each")
    train_minibatch_size: int = option(
        0, "questions a gradient step, a divisor of --batch-size; 0: the whole batch"
    )
    num_training_batches: int = option(100, "batches to train")
    samples_per_question: int = option(8, "outputs sampled for each question")
    max_generation_tokens: int = option(512, "longest output in tokens")
    temperature: float = option(1.0, "sampling temperature, also of every log-probability")
    max_staleness: int = option(
        0, "batches that generation may run ahead of published weights; 0: strictly on-policy"
    )

    advantage: str = option("grpo", "baseline of a group", choices=("grpo", "dr", "rloo"))
    aggregation: str = option(
        "sample-mean",
        "weight of a token in the loss",
        choices=("sample-mean", "token-mean", "constant"),
    )
    constant_length_samples: int = option(
        0, "divisor in tokens of --aggregation constant (Dr. GRPO)"
    )
    kl_coefficient: float = option(0.0, "weight of the KL penalty to the reference model")
    kl_estimator: str = option("k3", "estimator of the KL penalty", choices=("k2", "k3"))
    clip_low: float = option(0.2, "lower clip of the policy ratio")
    clip_high: float = option(0.2, "upper clip of the policy ratio")
    num_batches_per_ref_model_update: int = option(
        1_000_000, "batches between updates of the reference model with the policy's weights"
    )

    learning_rate: float = option(1e-6, "peak learning rate of AdamW")
    lr_scheduler: str = option(
        "constant_with_warmup",
        "learning-rate schedule over gradient steps",
        choices=("constant", "constant_with_warmup", "linear", "cosine"),
    )
    num_warmup_steps: int = option(0, "gradient steps of linear warm-up")
    adam_beta1: float = option(0.9, "first moment decay of AdamW")
    adam_beta2: float = option(0.95, "second moment decay of AdamW")
    adam_epsilon: float = option(1e-8, "epsilon of AdamW")
    weight_decay: float = option(0.0, "decoupled weight decay of AdamW")
    max_grad_norm: float = option(1.0, "clip of the global gradient norm; 0: no clipping")

    max_tokens_per_gpu: int = option(16384, "prompt + output tokens of one rank's minibatch")
    loss_chunksize: int = option(1024, "tokens whose logits exist at a time")
    mixed_precision: str = option(
        "auto", "compute type; master weights are float32", choices=("auto", "no", "bf16")
    )
    activation_checkpointing: bool = option(False, "recompute activations in the backward pass")
    use_torch_compile: bool = option(False, "compile the decoder layers")
    deterministic: bool = option(
        False, "form rounds in ordinal order from complete steps; needs --max-staleness 0"
    )

    min_samples_per_checkpoint: int = option(
        0, "samples trained between exports to hf_format/; 0: only at the end"
    )
    dump_samples_filename: str = option(
        "samples.jsonl", "file in the output folder for every trained sample; empty: none"
    )
    trackers: str = option(
        "tensorboard", "comma-separated accelerate trackers, such as tensorboard,wandb; empty: none"
    )
    run_name: str = option("async-grpo", "name of the run in trackers")

    ray_address: str = option("auto", "host:port of the Ray cluster; auto: the one on this machine")
    namespace: str = option("async-grpo", "Ray namespace that the run's actors share")
    worker_timeout_s: float = option(300.0, "seconds to wait for the workers that the run needs")
    stall_timeout_s: float = option(900.0, "seconds without progress after which the run ends")
    logging_level: str = option("INFO", "log detail", choices=("DEBUG", "INFO", "WARNING", "ERROR"))

    def __post_init__(self) -> None:
        for name in POSITIVE:
            value = getattr(self, name)
            require(value > 0, name, "must be positive", value, "give a positive number")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            require(value >= 0, name, "must not be negative", value, "give 0 or more")
        if self.objective == "grpo":
            self._check_grpo()
        require(
            self.batch_size % self.questions_per_step == 0,
            "train_minibatch_size",
            f"must divide --batch-size ({self.batch_size})",
            self.train_minibatch_size,
            "choose a divisor, or 0 for one gradient step a batch",
        )

    def _check_grpo(self) -> None:
        require(
            self.temperature > 0,
            "temperature",
            "must be positive for training",
            self.temperature,
            "at 0 every sample of a group is the same and nothing is learnt; 1.0 is usual",
        )
        require(
            self.samples_per_question >= 2,
            "samples_per_question",
            "must be at least 2, a group needs a baseline",
            self.samples_per_question,
            "8 is usual",
        )
        require(
            (self.aggregation == "constant") == (self.constant_length_samples > 0),
            "constant_length_samples",
            "goes with --aggregation constant, and only with it",
            self.constant_length_samples,
            "set both, for example to --max-generation-tokens, or neither",
        )
        require(
            self.max_generation_tokens < self.max_tokens_per_gpu,
            "max_tokens_per_gpu",
            f"must exceed --max-generation-tokens ({self.max_generation_tokens}) plus a prompt",
            self.max_tokens_per_gpu,
            "raise it or lower --max-generation-tokens",
        )
        moves = self.num_batches_per_ref_model_update < self.num_training_batches
        require(
            not (self.needs_reference and self.max_staleness and moves),
            "num_batches_per_ref_model_update",
            "must not be reached within the run when --max-staleness and --kl-coefficient are set",
            self.num_batches_per_ref_model_update,
            "batches in flight still need the older reference: drop one of the three",
        )
        require(
            not (self.deterministic and self.max_staleness),
            "max_staleness",
            "must be 0 with --deterministic",
            self.max_staleness,
            "drop one of the two",
        )

    @property
    def questions_per_step(self) -> int:
        """Questions a gradient step: M of the design."""
        return self.train_minibatch_size or self.batch_size

    @property
    def steps_per_batch(self) -> int:
        return self.batch_size // self.questions_per_step

    @property
    def needs_reference(self) -> bool:
        return self.objective == "grpo" and self.kl_coefficient > 0

    @property
    def denominator(self) -> str:
        """`on_policy` or `behaviour`: the policy in the ratio's denominator (design, section 4)."""
        on_policy = self.max_staleness == 0 and self.steps_per_batch == 1
        return "on_policy" if on_policy else "behaviour"

    @property
    def ratio_in_words(self) -> str:
        """What the policy ratio compares with, and what its clip does."""
        if self.denominator == "on_policy":
            return "the policy ratio's denominator is the policy itself, so its clip is inert"
        return (
            "the policy ratio's denominator is what the engine recorded, clipped to "
            f"[{1 - self.clip_low:g}, {1 + self.clip_high:g}]"
        )

    @property
    def tracker_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.trackers.split(",") if name.strip())
