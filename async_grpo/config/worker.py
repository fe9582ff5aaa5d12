"""Every option of `worker_dispatcher.py`."""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config.option import LOG_LEVELS, option, require, required
from async_grpo.deadlines import LEASE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Options of a dispatcher: it starts workers on its own node and stays in the foreground."""

    model_path: str = required(
        "Hugging Face folder of a causal language model", group="Usual options"
    )
    mode: str = option("generation", "role of the workers", choices=("generation", "logprob"))
    num_workers: int = option(1, "workers to start on this node")
    reward_fns: str = option(
        "math_verify",
        "(generation) comma-separated reward adapters, the best verdict counts: names of the "
        "registry, package.module:function, or path/to/file.py:function",
    )
    temperature: float = option(0.0, "serve only this sampling temperature; 0: the trainer's")
    model_revision: str = option(
        "", "branch, tag or commit of a model on a hub; empty: its main branch", none=""
    )
    dtype: str = option(
        "auto", "weights of the workers' model", choices=("auto", "float32", "bfloat16")
    )
    ray_address: str = option("auto", "host:port of the Ray cluster; auto: the one on this machine")
    namespace: str = option("async-grpo", "Ray namespace that the run's actors share")

    max_num_seqs: int = option(
        64, "sequences decoded together: a worker's capacity", group="Only with --mode generation"
    )
    max_model_len: int = option(0, "longest prompt + output in tokens; 0: the model's own limit")
    overhead_seqs: int = option(8, "sequences accepted beyond the capacity, so it never runs dry")
    tensor_parallel_size: int = option(1, "devices a worker shards its model over")
    kv_cache_gib: float = option(0.0, "KV cache in GiB; 0: 0.25 on CPU, vLLM's choice on GPU")
    enable_prefix_caching: bool = option(True, "reuse the cache of shared prompt prefixes")
    reward_registry: str = option("reward_registry", "module or file that holds REWARD_ADAPTERS")
    global_num_verifiers: int = option(50, "verifier processes, at most the cluster's cores")
    verifier_timeout_s: float = option(10.0, "seconds one verification may take")
    verifier_memory_mib: int = option(4096, "address space of one verifier process in MiB")
    verifier_network: bool = option(True, "own reward functions may use the network; ours never do")
    verifier_env: str = option(
        "", "comma-separated variables that own reward functions get, as JUDGE_API_KEY", none=""
    )
    write_failed_generation_samples: bool = option(
        False, "append samples whose verification failed to failed_samples.jsonl, here"
    )

    max_tokens_per_gpu: int = option(
        16384, "tokens of one packed forward", group="Only with --mode logprob"
    )

    start_timeout_s: float = option(
        600.0, "seconds a worker may take to load and register", group="Keeping workers alive"
    )
    worker_lease_s: float = option(
        LEASE_S,
        "seconds of silence after which a worker counts as lost: more than it ever computes "
        "without a pause, on a slow machine",
    )
    max_restarts: int = option(
        5, "times in an hour that a lost worker is started again, each after a longer pause"
    )
    drain_timeout_s: float = option(
        30.0, "seconds that running work may take after the first Ctrl-C; the second ends at once"
    )
    logging_level: str = option("INFO", "log detail", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        for name in ("num_workers", "tensor_parallel_size", "max_num_seqs", "global_num_verifiers"):
            value = getattr(self, name)
            require(value >= 1, name, "must be at least 1", value, "give a positive number")
        for name in (
            "overhead_seqs", "kv_cache_gib", "temperature", "max_model_len", "max_restarts",
            "drain_timeout_s",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value >= 0, name, "must not be negative", value, "give 0 or more")
        for name in (
            "max_tokens_per_gpu", "verifier_timeout_s", "verifier_memory_mib", "worker_lease_s",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value > 0, name, "must be positive", value, "give a positive number")
        require(
            bool(self.reward_names),
            "reward_fns",
            "must name at least one adapter",
            self.reward_fns,
            "for example --reward-fns countdown",
        )

    @property
    def verifier_variables(self) -> tuple[str, ...]:
        """Names of the environment that users' functions receive."""
        return tuple(name.strip() for name in self.verifier_env.split(",") if name.strip())

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The adapters that grade every sample."""
        return tuple(name.strip() for name in self.reward_fns.split(",") if name.strip())
