"""Every option of `worker_dispatcher.py`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from async_grpo.config.option import (
    AT_LEAST_1,
    LOG_LEVELS,
    POSITIVE,
    Options,
    Several,
    flag,
    names_in,
    option,
)
from async_grpo.config.roles import (
    ENGINES,
    GENERATION,
    JUDGE,
    LOGPROB,
    MODES,
    REFERENCE,
    REWARD,
    SERVICE,
    TEACHER,
    VERIFIER,
    ServiceTerms,
    judge,
    name_of_class,
    service,
    teacher,
)
from async_grpo.util.deadlines import LEASE_S
from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import UserCode, split_arguments, text_of

DEFAULT_MAX_NUM_SEQS = 64
LEAST_OVERHEAD = 8
LARGEST_RANK = 512  # of an adapter, in vLLM
WITH_MODEL = (GENERATION, LOGPROB, TEACHER, JUDGE, REWARD)
SCORERS = (LOGPROB, TEACHER)
USERS_OWN = "path/to/file.py:Name"  # a mode with a colon names a class of the user
SWITCHES = {  # former environment variables, and the options that replace them
    "ASYNC_GRPO_VERIFIER_NAMESPACES": "--unconfined-rewards",
    "ASYNC_GRPO_ALLOW_UNCONFINED_CODE": "--unconfined-code",
}
# `--engine-option`: which of vLLM's own options a user may set.
OURS = {  # vLLM's name: our option
    "model": "model_path",
    "revision": "model_revision",
    "kv_cache_memory_bytes": "kv_cache_gib",
    **{
        name: name
        for name in (
            "dtype", "enable_prefix_caching", "gpu_memory_utilization", "max_lora_rank",
            "max_loras", "max_model_len", "max_num_seqs", "tensor_parallel_size",
        )
    },
}  # fmt: skip
# Patterns of vLLM's options that users may not set, and why.
CONTRACT = "it would change what tokens or log-probabilities mean, and the trainer would not know"
WEIGHTS = "weights of the trainer could not be loaded into such an engine, or from there"
PROCESSES = "workers are placed and supervised here"
REFUSED = {
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logprobs_mode", "logits_processors",
         "spec*", "watermark*", "seed", "tokenizer*", "skip_tokenizer_init", "scheduler_cls",
         "scheduling_policy", "return_sampling_mask", "diffusion_config", "runner", "convert",
         "stream_interval"),
        CONTRACT,
    ),
    **dict.fromkeys(
        ("hf_*", "quantization*", "allow_deprecated_quantization", "load_format", "model_*",
         "*lora*", "disable_sliding_window", "weight_transfer_config", "enable_sleep_mode",
         "sleep_*", "offload_*", "cpu_offload*", "trust_remote_code", "code_revision"),
        WEIGHTS,
    ),
    **dict.fromkeys(
        ("data_parallel*", "pipeline_parallel*", "prefill_context*", "decode_context*", "nnodes",
         "node_rank", "master_*", "device_ids", "distributed_executor_backend", "worker_*",
         "_*", "disable_log_stats", "ray_*", "additional_config"),
        PROCESSES,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(Options):
    """Options of a dispatcher, which starts workers on its node and stays in the foreground."""

    model_path: str = option("", group="Usual options")
    """Hugging Face folder of a causal language model; verifiers and environments need none"""
    mode: str = option(GENERATION, choices=(*MODES, USERS_OWN))
    """what the workers do; logprob scores with the reference model, reward with a sequence
    classifier, services["reward"]; a class of yours is a service too, which environments ask"""
    name: str = option("")
    """(teacher, judge, reward, service) the name by which an algorithm, or an environment, asks for
    it; by default reward, of a service its class' name, in lower case with _ between words"""
    num_workers: int = option(1, must=AT_LEAST_1)
    """workers to start on this node"""
    reward_fns: str = option("math_verify")
    """(generation, verifier) comma-separated reward adapters, the best verdict counts: names of the
    registry, package.module:function, or path/to/file.py:function, file.py:function(by=2);
    empty: no verifier"""
    temperature: float = option(0.0)
    """serve only this sampling temperature; 0: the trainer's"""
    model_revision: str = option("", none="")
    """branch, tag or commit of a model on a hub; empty: its main branch"""
    dtype: str = option("auto", choices=("auto", "float32", "bfloat16"))
    """weights of the workers' model"""
    ray_address: str = option("auto")
    """host:port of the Ray cluster; auto: the one on this machine"""
    namespace: str = option("async-grpo")
    """Ray namespace that the run's actors share"""

    max_num_seqs: int = option(0, group="Only with --mode generation")
    """sequences decoded together, or episodes played: a worker's capacity; 0: 64, on devices vLLM's
    own for a server, 256 to 1024"""
    max_model_len: int = option(0)
    """longest prompt + output in tokens; 0: the model's own limit"""
    overhead_seqs: int = option(0)
    """sequences accepted beyond the capacity, so it never runs dry between two pings, which tell of
    those that have ended; 0: a quarter of it, at least 8"""
    tensor_parallel_size: int = option(1, must=AT_LEAST_1)
    """devices a worker shards its model over"""
    kv_cache_gib: float = option(0.0)
    """KV cache in GiB; 0: 0.25 on CPU, vLLM's choice on GPU"""
    engine_option: tuple[str, ...] = option((), several=Several("\n"))
    """KEY=VALUE of vLLM's engine, such as kv_cache_dtype=fp8; give it once for each"""
    enable_prefix_caching: bool = option(True)
    """reuse the cache of shared prompt prefixes"""
    keep_kv_cache: bool = option(False)
    """running sequences keep their KV cache when weights are updated, rather than compute it again:
    log-probabilities of what they sample after it are then of mixed weights"""
    max_lora_rank: int = option(0)
    """serve adapters of at most this rank beside the model, which then takes no weights of its own;
    0: none"""
    max_loras: int = option(4, must=AT_LEAST_1)
    """adapters, one a weights version, of which sequences may run at a time; those of more wait"""
    unconfined_rewards: bool = option(
        False, group="Only with --mode generation, verifier or environment"
    )
    """(generation, verifier) permit that rewards grade where they cannot be confined: what they
    run then has all the rights of your user"""
    unconfined_code: bool = option(False)
    """the same of programs that the model has written, which a reward or an environment runs"""

    reward_registry: str = option(
        "reward_registry", group="Only with --mode generation or verifier"
    )
    """module or file that holds REWARD_ADAPTERS"""
    global_num_verifiers: int = option(50, must=AT_LEAST_1)
    """verifier processes of all nodes that grade together, at most their cores"""
    verifier_timeout_s: float = option(10.0, must=POSITIVE)
    """seconds one verification may take"""
    verifier_memory_mib: int = option(4096, must=POSITIVE)
    """MiB that all processes of a verification may hold together, and the address space of each"""
    verifier_network: bool = option(True)
    """own reward functions may use the network; ours never do"""
    verifier_env: str = option("", none="")
    """comma-separated variables that own reward functions get, as JUDGE_API_KEY"""
    write_failed_generation_samples: bool = option(False)
    """append samples whose verification failed to failed_samples.jsonl, here"""

    judge_url: str = option("", group="Only with --mode judge", none="")
    """where an OpenAI-compatible service answers as --model-path, such as https://host/v1; empty:
    workers here, which load --model-path"""
    judge_key: str = option("", none="")
    """name of the variable that holds the service's key, as JUDGE_API_KEY"""

    max_tokens_per_gpu: int = option(
        16384, group="Only with --mode logprob or teacher", must=POSITIVE
    )
    """tokens of one packed forward, of each rank"""
    scorer_ranks: int = option(1, must=AT_LEAST_1)
    """devices, or processes on CPUs, over which a worker shards its model by FSDP2; each scores
    outputs of its own"""

    gpus_per_worker: float = option(1.0, group="Devices", must=POSITIVE)
    """share of a device that Ray gives to a worker: below 1 others may use the rest"""
    gpu_memory_utilization: float = option(0.0)
    """share of its devices' memory that a worker may take, weights and caches; 0: 0.92 of whole
    devices, --gpus-per-worker of a shared one"""

    colocated: bool = option(False)
    """(generation) engines that can sleep, while a trainer with --colocated has their devices"""

    start_timeout_s: float = option(1800.0, group="Keeping workers alive")
    """seconds a worker may take to load and register: a large model on a network disk takes long"""
    worker_lease_s: float = option(LEASE_S, must=POSITIVE)
    """seconds of silence after which a worker counts as lost: more than it ever computes without a
    pause, on a slow machine"""
    max_restarts: int = option(5)
    """times in an hour that a lost worker is started again, each after a longer pause"""
    drain_timeout_s: float = option(30.0)
    """seconds that running work may take after the first Ctrl-C; the second ends at once"""
    logging_level: str = option("INFO", choices=LOG_LEVELS)
    """log detail"""

    def check(self) -> None:
        """See `Options`."""
        refuse_switches()
        if not self.reward_names and (self.reward_fns or self.mode != GENERATION):
            raise self.refusal(
                "reward_fns",
                "must name at least one adapter",
                "for example --reward-fns countdown",
            )
        for name in self.reward_names:
            check_reward(name)
        may_name = self.kind in (SERVICE, REWARD)
        if not may_name and bool(self.name) != (self.mode in (TEACHER, JUDGE)):
            raise self.refusal(
                "name",
                "must be given with --mode teacher or judge, and only then",
                "for example --mode teacher --name math",
            )
        if not self.model_path and self.mode in WITH_MODEL:
            raise self.refusal(
                "model_path",
                f"must be given with --mode {self.mode}",
                "name a folder or a model of the hub",
            )
        if self.judge_url and self.mode != JUDGE:
            raise self.refusal("judge_url", "needs --mode judge", "give both, or drop it")
        if self.judge_url and not os.environ.get(self.judge_key):
            raise self.refusal(
                "judge_key",
                f"must name a variable with the key of --judge-url {self.judge_url}",
                "for example `export JUDGE_API_KEY=...`, and --judge-key JUDGE_API_KEY",
            )
        self._check_devices()
        if self.max_lora_rank > LARGEST_RANK:
            raise self.refusal(
                "max_lora_rank",
                f"must be at most {LARGEST_RANK}, which vLLM serves",
                "train a smaller --lora-rank, or have it published merged",
            )
        if self.max_lora_rank and self.mode != GENERATION:
            raise self.refusal(
                "max_lora_rank", f"must be 0 with --mode {self.mode}", "generation serves adapters"
            )
        if self.num_workers > 1 and self.mode == VERIFIER:
            raise self.refusal(
                "num_workers",
                "must be 1 with --mode verifier",
                "one pool runs as many processes as --global-num-verifiers allows",
            )

    def _check_devices(self) -> None:
        if self.gpus_per_worker > 1:
            raise self.refusal(
                "gpus_per_worker", "must be at most 1", "--tensor-parallel-size takes several"
            )
        if self.gpus_per_worker < 1 and self.tensor_parallel_size > 1:
            raise self.refusal(
                "gpus_per_worker",
                f"must be 1 with --tensor-parallel-size {self.tensor_parallel_size}",
                "Ray shares single devices only",
            )
        if self.colocated and self.mode != GENERATION:
            raise self.refusal(
                "colocated", f"is for --mode generation, got {self.mode}", "leave it out"
            )
        if self.scorer_ranks > 1:
            self._check_scorer_ranks()
        if self.gpu_memory_utilization > 1:
            raise self.refusal(
                "gpu_memory_utilization", "must be at most 1", "0.92 is vLLM's own choice"
            )
        parse_engine_options(self.engine_option)

    def _check_scorer_ranks(self) -> None:
        if self.mode not in SCORERS:
            raise self.refusal(
                "scorer_ranks",
                f"must be 1 with --mode {self.mode}",
                "engines are divided by --tensor-parallel-size, trainers by --nproc-per-node",
            )
        if self.gpus_per_worker < 1:
            raise self.refusal(
                "gpus_per_worker",
                f"must be 1 with --scorer-ranks {self.scorer_ranks}",
                "each rank takes a whole device",
            )

    @property
    def engine_options(self) -> Mapping[str, str]:
        """{vLLM's name: what was typed} of `--engine-option`."""
        return parse_engine_options(self.engine_option)

    @property
    def memory_share(self) -> float:
        """Share of its devices' memory that a worker may take; 0: the default of its engine."""
        shared = self.gpus_per_worker if self.gpus_per_worker < 1 else 0.0
        return self.gpu_memory_utilization or shared

    @property
    def kind(self) -> str:
        """The mode, or `SERVICE` for a class of the user."""
        return SERVICE if ":" in self.mode else self.mode

    @property
    def terms(self) -> ServiceTerms:
        """Capacity and devices of a service; raises `ConfigError` for a class that is none."""
        return ServiceTerms.read(self.mode)

    @property
    def serves_model(self) -> bool:
        """Whether these workers load a model."""
        return self.mode in WITH_MODEL and not self.judge_url

    @property
    def num_devices(self) -> int:
        """Devices that each worker takes, on a machine that has any."""
        if self.kind == SERVICE:
            return self.terms.devices
        if not self.serves_model:
            return 0
        if self.mode in SCORERS:
            return self.scorer_ranks
        return self.tensor_parallel_size if self.mode in ENGINES else 1

    @property
    def role(self) -> str:
        """The role of these workers; see `async_grpo.config.roles`."""
        if self.mode == TEACHER:
            return teacher(self.name)
        if self.mode == JUDGE:
            return judge(self.name)
        if self.kind in (SERVICE, REWARD):
            return service(self.name or name_of_class(self.mode))
        return REFERENCE if self.mode == LOGPROB else self.mode

    def overhead(self, capacity: int) -> int:
        """Sequences that are accepted beyond this capacity."""
        return self.overhead_seqs or max(LEAST_OVERHEAD, capacity // 4)

    @property
    def capacity(self) -> int:
        """Sequences, episodes or requests at a time; engines on devices take vLLM's default."""
        stated = self.terms.capacity if self.kind == SERVICE else DEFAULT_MAX_NUM_SEQS
        return self.max_num_seqs or stated

    @property
    def verifier_variables(self) -> tuple[str, ...]:
        """Names of the environment variables that users' reward functions receive."""
        return names_in(self.verifier_env)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The adapters that grade every sample."""
        return names_in(self.reward_fns)


def check_reward(name: str) -> None:
    """Raise `ConfigError` for arguments that a reward does not take, judged by its text.

    A file that is not found is left to whoever loads it.
    """
    called, arguments = split_arguments(name)
    place, colon, _ = called.rpartition(":")
    try:
        text = text_of(place) if colon else ""
    except (OSError, SyntaxError, ImportError, ValueError):
        return
    UserCode(called, text, arguments).check_arguments(num_given=1)


def check_services(workers: Iterable[WorkerConfig]) -> None:
    """Raise `ConfigError` for a class that is no service, or for two services of one name."""
    named: dict[str, WorkerConfig] = {}
    for each in workers:
        if each.kind == SERVICE and each.terms != named.setdefault(each.role, each).terms:
            raise each.refusal(
                "mode",
                f"must be that of every {each.role} worker, {named[each.role].mode}",
                "give one of them another --name",
            )


def refuse_switches() -> None:
    """Raise `ConfigError` for an environment variable that used to switch a confinement off."""
    for variable, typed in SWITCHES.items():
        if variable in os.environ:
            raise ConfigError(
                f"{variable} must not be set, got {os.environ[variable]!r}: unset it; {typed} "
                "permits what it switched, where nothing can be confined"
            )


def parse_engine_options(lines: Iterable[str]) -> Mapping[str, str]:
    """{vLLM's name: what was typed} of KEY=VALUE lines; raises `ConfigError` for what is refused.

    >>> parse_engine_options(["kv-cache-dtype = fp8"])
    {'kv_cache_dtype': 'fp8'}
    """
    options = {}
    for line in lines:
        key, is_given, value = line.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not (is_given and key.isidentifier()):
            raise ConfigError(
                f"--engine-option must be KEY=VALUE, got {line!r}: for example "
                "--engine-option kv_cache_dtype=fp8"
            )
        if key in OURS:
            remedy = f"has an option of its own here: give {flag(OURS[key])}"
            raise ConfigError(f"--engine-option {key} {remedy}, got {line!r}")
        for pattern, why in REFUSED.items():
            if fnmatch(key, pattern):
                raise ConfigError(f"--engine-option {key} is refused, got {line!r}: {why}")
        options[key] = value.strip()
    return options


def check_known(options: Mapping[str, str], known: Collection[str]) -> None:
    """Raise `ConfigError` for an option that vLLM does not have; `known`: those it has.

    >>> check_known({"kv_cache_dtyp": "fp8"}, ["block_size", "kv_cache_dtype"])
    Traceback (most recent call last):
    async_grpo.util.errors.ConfigError: --engine-option kv_cache_dtyp is no option of vLLM, got \
kv_cache_dtyp=fp8: the nearest is kv_cache_dtype
    """
    for name, text in options.items():
        if name not in known:
            [nearest] = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"--engine-option {name} is no option of vLLM, got {name}={text}: the nearest is "
                f"{nearest}"
            )
