"""A run to be planned: its options, the sizes of its models, the devices that it may have. Pure.

Devices are as their makers' data sheets state them: dense products of bfloat16 without sparsity,
one direction of links. Sizes of a model come from config.json, or from its published name. Every
model counts as a dense decoder: embedding [V, H], in each layer queries [H, Q], keys and values
[H, K] each, output [Q, H], a gated MLP of three [H, I], two norms; a last norm and, unless tied, a
head [V, H].
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.roles import GENERATION, JUDGE, LOGPROB, REFERENCE, REWARD, SERVICE, TEACHER
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.training_options import AdapterOptions
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.bill import FLOAT32, ModelShape, TrainedShare
from async_grpo.util.errors import ConfigError, UnfitModel
from async_grpo.weight_sync.routes import adapter_rank, as_stated, publishes_adapter

BF16 = 2
CORES = 50  # of a machine with devices, for verifiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of a run, the sizes of its models, and the machines for it."""

    train: TrainConfig
    workers: tuple[WorkerConfig, ...]
    num_ranks: int
    model: ModelShape
    worker_models: Mapping[int, ModelShape]  # by the number of the worker's table
    longest: Mapping[int, int]  # tokens of prompt and output that each of these workers takes
    fleet: Fleet
    host_bytes: int = 0  # memory of a machine; 0: unknown
    stored_bytes: int = BF16  # of one number in the model's files
    adapter: Mapping[str, Any] = field(default_factory=dict)  # peft's configuration; empty: none

    @property
    def on_cpu(self) -> bool:
        return not self.fleet.num_devices

    @property
    def generation(self) -> int:
        """The number of the first table of generation workers; `ConfigError` without any."""
        found = [n for n, each in enumerate(self.workers) if each.mode == GENERATION]
        if not found:
            raise ConfigError(
                "[[worker]] mode must be generation in one table, there is none: add the workers "
                "that the run will have"
            )
        return found[0]

    @property
    def scorers(self) -> tuple[int, ...]:
        """The numbers of the tables whose workers score for the algorithm."""
        needs = {need.role for need in find_algorithm(self.train).needs}
        modes = (TEACHER, LOGPROB) if REFERENCE in needs else (TEACHER,)
        return tuple(n for n, each in enumerate(self.workers) if each.mode in modes)

    @property
    def own_split(self) -> Split:
        """The split that the run's file gives."""
        engines = sum(each.num_workers for each in self.workers if each.mode == GENERATION)
        scorers = tuple(self.workers[number].num_workers for number in self.scorers)
        return Split(engines=engines, ranks=self.num_ranks, scorers=scorers)

    @property
    def num_samples(self) -> int:
        """Samples of a batch."""
        return self.train.batching.batch_size * self.train.sampling.samples_per_question

    @property
    def engine_devices(self) -> int:
        """Devices of one engine."""
        return self.workers[self.generation].tensor_parallel_size

    @property
    def train_bytes(self) -> int:
        """Bytes of one value in the trainer's compute dtype."""
        return self._bytes_of(self.train.memory.mixed_precision)

    def worker_bytes(self, number: int) -> int:
        """Bytes of one value of a worker's weights."""
        return self._bytes_of(self.workers[number].dtype)

    def _bytes_of(self, dtype: str) -> int:
        is_bf16 = dtype in ("bf16", "bfloat16") or (dtype == "auto" and not self.on_cpu)
        return BF16 if is_bf16 else FLOAT32

    @property
    def published(self) -> int:
        """Numbers that workers are sent with each version of the weights."""
        trained = self.model.trained
        if trained is None:
            return self.model.num_parameters
        infos = [as_stated(each, on_cpu=self.on_cpu) for each in self.workers]
        is_alone, _ = publishes_adapter(self.train, self.adapter, infos)
        return trained.num_parameters if is_alone else trained.touched_parameters

    def with_train(self, **options: Any) -> Asked:
        """The same run with other options of the trainer, an adapter by --lora-rank among them."""
        train = self.train.but(**options)
        return self.adapted(
            train.adapter.stated if train.adapter.lora_rank else self.adapter, train
        )

    def without_adapter(self) -> Asked:
        """The same run, in which all parameters train."""
        options = {each.name: each.default for each in fields(AdapterOptions)}
        return self.adapted({}, self.train.but(**options))

    def adapted(self, adapter: Mapping[str, Any], train: TrainConfig) -> Asked:
        """The same run with these options, in which this adapter trains; empty: all does."""
        frozen = min(self.stored_bytes, FLOAT32) if self.train_bytes == BF16 else FLOAT32
        packs = train.adapter.base_quantization
        trained = trained_of(self.model, adapter, frozen, packs=packs) if adapter else None
        model = replace(self.model, trained=trained)
        return replace(self, model=model, adapter=adapter, train=train)

    @property
    def num_verifiers(self) -> int:
        """Processes that grade at a time; 0: no worker has rewards."""
        pool = next((each for each in self.workers if each.reward_names), None)
        return min(pool.global_num_verifiers, self.fleet.num_cores or CORES) if pool else 0

    def room(self, share: float) -> int:
        """Bytes of memory in a share of one device."""
        return int(self.fleet.kind.memory_bytes * share)

    def with_worker(self, number: int, **options: Any) -> Asked:
        """The same run with other options in one table of workers."""
        workers = list(self.workers)
        workers[number] = replace(workers[number], **options)
        return replace(self, workers=tuple(workers))

    def shard_ranks(self, num_ranks: int) -> int:
        """How many of `num_ranks` ranks share one copy of the model."""
        asked = self.train.memory.shard_ranks
        if asked is None:
            machines = 1 if self.on_cpu else -(-num_ranks // self.fleet.of_a_node)
            return num_ranks // machines
        return asked or num_ranks

    @property
    def is_shared(self) -> bool:
        """Whether several processes of the run share a device, at a time or in turns."""
        shares = [each.gpus_per_worker for each in self.workers if each.num_devices]
        memory = self.train.memory
        return not self.on_cpu and (memory.colocated or min(memory.gpus_per_rank, *shares) < 1)

    @property
    def other_devices(self) -> int:
        """Devices of the file's judges, reward models and services, which every split has."""
        others = [each for each in self.workers if each.kind in (JUDGE, REWARD, SERVICE)]
        return sum(each.num_workers * each.num_devices for each in others)

    def scoring_devices(self, scorers: Sequence[int]) -> int:
        """Devices of so many workers of each role that scores, in the order of `scorers`."""
        counts = zip(self.scorers, scorers, strict=True)
        return sum(count * self.workers[number].num_devices for number, count in counts)

    def devices_of(self, split: Split) -> int:
        """Devices that the split takes, with those of judges and services."""
        others = self.scoring_devices(split.scorers) + self.other_devices
        return split.ranks + split.engines * self.engine_devices + others


@dataclass(frozen=True, slots=True)
class Split:
    """How many processes of each role a run has."""

    engines: int
    ranks: int
    scorers: tuple[int, ...] = ()  # in the order of `Asked.scorers`


A_NODE = 8  # devices of a machine by default


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device; a CPU is one core, whose memory is its machine's."""

    name: str
    flops: float  # a second, of products in the compute dtype
    bytes_per_s: float  # of its memory
    memory_bytes: float
    link_bytes_per_s: float  # to the devices of its machine
    network_bytes_per_s: float = 50e9  # a device's share: 400 Gb/s
    host_bytes_per_s: float = 64e9  # PCIe Gen5 x16
    is_cpu: bool = False
    has_large_batches: bool = True  # vLLM's defaults for this device are large
    source: str = ""  # of these numbers; empty: the maker's data sheet


H100 = DeviceKind(name="H100", flops=989e12, bytes_per_s=3.35e12, memory_bytes=80e9,
            link_bytes_per_s=450e9)  # fmt: skip
A100 = DeviceKind(name="A100", flops=312e12, bytes_per_s=2.04e12, memory_bytes=80e9,
            link_bytes_per_s=300e9, network_bytes_per_s=25e9, host_bytes_per_s=32e9,
            has_large_batches=False)  # fmt: skip
L40S = DeviceKind(name="L40S", flops=362e12, bytes_per_s=0.864e12, memory_bytes=48e9,
            link_bytes_per_s=32e9, network_bytes_per_s=25e9, host_bytes_per_s=32e9,
            has_large_batches=False)  # fmt: skip
CPU = DeviceKind(name="CPU", flops=18e9, bytes_per_s=8e9, memory_bytes=0, link_bytes_per_s=2e9,
           network_bytes_per_s=1e9, host_bytes_per_s=8e9, is_cpu=True)  # fmt: skip
KINDS = {
    each.name: each
    for each in (
        H100,
        replace(H100, name="H200", bytes_per_s=4.8e12, memory_bytes=141e9),
        replace(H100, name="B200", flops=2250e12, bytes_per_s=7.7e12, memory_bytes=180e9,
                link_bytes_per_s=900e9),
        A100,
        replace(A100, name="A100-40", bytes_per_s=1.555e12, memory_bytes=40e9),
        L40S,
        replace(L40S, name="A10G", flops=70e12, bytes_per_s=0.6e12, memory_bytes=24e9),
        replace(L40S, name="L4", flops=121e12, bytes_per_s=0.3e12, memory_bytes=24e9),
        replace(L40S, name="RTX4090", flops=165e12, bytes_per_s=1.008e12, memory_bytes=24e9),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fleet:
    """The devices that a run may have, all of one kind; without nodes it runs on CPUs."""

    nodes: tuple[int, ...]  # devices of each machine
    kind: DeviceKind
    num_cores: int = 0  # that all processes share; 0: devices do the work
    threads: int = 1  # of each process that computes on cores

    @property
    def num_devices(self) -> int:
        return sum(self.nodes)

    @property
    def of_a_node(self) -> int:
        return max(self.nodes, default=1)

    def __str__(self) -> str:
        if not self.num_devices:
            return f"{self.num_cores} CPU cores"
        nodes = f" on {len(self.nodes):,} machines" if len(self.nodes) > 1 else ""
        return f"{self.num_devices:,} x {self.kind.name}{nodes}"


def fleet_of(text: str, *, kind: str = "") -> Fleet:
    """The fleet of a text: 16, 8,8 (machines) or 16xH200; machines have 8 devices by default.

    Raises `ConfigError` for a text that names no devices, and for an unknown kind.

    >>> fleet_of("20xA100").nodes, str(fleet_of("8,8"))
    ((8, 8, 4), '16 x H100 on 2 machines')
    """
    count, _, named = text.partition("x")
    name = named or kind or H100.name
    if name not in KINDS:
        raise ConfigError(
            f"--devices must name a kind that is known ({', '.join(KINDS)}), got {name!r}: choose "
            "the nearest, and give what it really does with --rates"
        )
    if not re.fullmatch(r"\d+(,\d+)*", count) or not sum(map(int, count.split(","))):
        raise ConfigError(
            f"--devices must be a number of devices, those of each machine, or a number and a "
            f"kind, got {text!r}: 16, 8,8 and 16xH200 are such"
        )
    nodes = [int(part) for part in count.split(",")]
    if len(nodes) == 1:
        whole, rest = divmod(nodes[0], A_NODE)
        nodes = [A_NODE] * whole + [rest] * (rest > 0)
    return Fleet(tuple(each for each in nodes if each), KINDS[name])


NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
WITH_BIAS = ("qwen2",)  # model types whose queries, keys and values have a bias
WITH_HEAD_NORMS = ("qwen3", "gemma3_text", "olmo2")


def _config(  # the sizes that config.json of a published model states
    kind: str, hidden: int, intermediate: int, layers: int, heads: int, key_heads: int,
    vocabulary: int, *, head: int = 0, tied: bool = False,
) -> Mapping[str, object]:  # fmt: skip
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "vocab_size": vocabulary, "head_dim": head or None,
        "tie_word_embeddings": tied,
    }  # fmt: skip


PUBLISHED = {
    "smollm2-135m": _config("llama", 576, 1536, 30, 9, 3, 49152, tied=True),
    "qwen2.5-0.5b": _config("qwen2", 896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _config("qwen2", 1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _config("qwen2", 2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _config("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _config("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _config("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _config("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "deepseek-r1-distill-qwen-1.5b": _config("qwen2", 1536, 8960, 28, 12, 2, 151936),
    "deepseek-r1-distill-qwen-7b": _config("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen3-0.6b": _config("qwen3", 1024, 3072, 28, 16, 8, 151936, head=128, tied=True),
    "qwen3-1.7b": _config("qwen3", 2048, 6144, 28, 16, 8, 151936, head=128, tied=True),
    "qwen3-4b": _config("qwen3", 2560, 9728, 36, 32, 8, 151936, head=128, tied=True),
    "qwen3-8b": _config("qwen3", 4096, 12288, 36, 32, 8, 151936, head=128),
    "qwen3-14b": _config("qwen3", 5120, 17408, 40, 40, 8, 151936, head=128),
    "qwen3-32b": _config("qwen3", 5120, 25600, 64, 64, 8, 151936, head=128),
    "llama-3.2-1b": _config("llama", 2048, 8192, 16, 32, 8, 128256, head=64, tied=True),
    "llama-3.2-3b": _config("llama", 3072, 8192, 28, 24, 8, 128256, head=128, tied=True),
    "llama-3.1-8b": _config("llama", 4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _config("llama", 8192, 28672, 80, 64, 8, 128256),
    "llama-3.3-70b": _config("llama", 8192, 28672, 80, 64, 8, 128256),
}
ENDINGS = ("-instruct", "-base", "-chat")


def shape_of_config(config: Mapping[str, Any], *, who: str, num_parameters: int = 0) -> ModelShape:
    """The sizes in a decoder's config.json; `num_parameters`: of its files, 0: to be computed.

    Raises `UnfitModel` for a config without one of `NEEDED`.
    """
    if missing := [name for name in NEEDED if not isinstance(config.get(name), int)]:
        raise UnfitModel(
            f"config.json of {who} must say {missing[0]}: name the folder of a text model, or one "
            "of the same sizes with --shape-of"
        )
    hidden, layers, heads, vocabulary = (int(config[name]) for name in NEEDED)
    head = config.get("head_dim") or hidden // heads
    query, key = heads * head, (config.get("num_key_value_heads") or heads) * head
    mlp = config.get("intermediate_size") or 4 * hidden
    kind = str(config.get("model_type"))
    norms_heads = kind in WITH_HEAD_NORMS
    layer = 2 * hidden * query + 2 * hidden * key + 3 * hidden * mlp + 2 * hidden
    layer += (query + 2 * key) * (kind in WITH_BIAS) + 2 * head * norms_heads
    root = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2) + hidden
    if num_parameters > root:
        layer = (num_parameters - root) // layers
    return ModelShape(
        num_parameters=num_parameters or layers * layer + root,
        layer_parameters=layer,
        root_parameters=root,
        num_layers=layers,
        hidden=hidden,
        intermediate=mlp,
        query_width=query,
        key_width=key,
        num_heads=heads,
        vocab_size=vocabulary,
        norms_heads=norms_heads,
    )


def trained_of(
    model: ModelShape, adapter: Mapping[str, Any], frozen_bytes: int, *, packs: str = "none"
) -> TrainedShare:
    """What trains of a model's sizes with an adapter, by peft's names of its configuration.

    Of modules to save those outside of layers count: embed_tokens, norm and lm_head.
    """
    hidden, query, key, mlp = model.hidden, model.query_width, model.key_width, model.intermediate
    layers = {
        "self_attn.q_proj": (hidden, query), "self_attn.k_proj": (hidden, key),
        "self_attn.v_proj": (hidden, key), "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, mlp), "mlp.up_proj": (hidden, mlp),
        "mlp.down_proj": (mlp, hidden),
    }  # fmt: skip
    targets, saved = adapter["target_modules"], adapter.get("modules_to_save") or ()
    if targets == "all-linear":
        chosen = [*layers.values()]
    elif isinstance(targets, str):  # a regular expression
        named = layers.items()
        chosen = [each for n, each in named if re.fullmatch(targets, f"model.layers.0.{n}")]
    else:
        chosen = [each for n, each in layers.items() if n.endswith(tuple(targets))]
    rank, of_vocabulary = adapter_rank(adapter), model.vocab_size * hidden
    layer = sum(rank * (a + b) + b * bool(adapter.get("use_dora")) for a, b in chosen)
    root = of_vocabulary * (("lm_head" in saved) + ("embed_tokens" in saved))
    root += hidden * ("norm" in saved)
    sizes = [a * b for a, b in chosen]
    return TrainedShare(
        num_parameters=model.num_layers * layer + root,
        layer_parameters=layer,
        token_values=rank * len(chosen),
        root_parameters=root,
        touched_parameters=model.num_layers * sum(sizes) + root,
        frozen_bytes=frozen_bytes,
        trains_head="lm_head" in saved,
        packed_parameters=model.num_layers * sum(sizes) * (packs != "none"),
        packs=packs,
        unpacked_values=max(sizes, default=0) * (packs != "none"),
    )


def flops_a_parameter(model: ModelShape) -> float:
    """FLOPs to train a token, over the parameters in its products (`model.policy`)."""
    if model.trained is None:
        return 6.0
    return 4.0 + 6.0 * model.trained.num_parameters / multiplied(model)


def published_config(name: str) -> Mapping[str, object] | None:
    """The config of the published model of this name; None for an unknown name.

    >>> published_config("Qwen/Qwen2.5-7B-Instruct")["num_hidden_layers"]
    28
    """
    plain = name.rpartition("/")[2].lower().replace("meta-", "")
    for ending in ENDINGS:
        plain = plain.replace(ending, "")
    return PUBLISHED.get(plain)


def unknown_model(name: str) -> UnfitModel:
    """The error for a model whose sizes are unknown."""
    plain = name.rpartition("/")[2].lower()
    [near] = difflib.get_close_matches(plain, PUBLISHED, n=1, cutoff=0.0)
    return UnfitModel(
        f"--model-name-or-path or --model-path {name} is no folder of this machine, nor a name "
        f"whose sizes are known here (the nearest is {near}): fetch it, or name a model of the "
        "same sizes with --shape-of"
    )


def multiplied(model: ModelShape) -> int:
    """Parameters in the matrix products of one token: with the head, without the embedding."""
    return model.num_layers * model.layer_parameters + model.vocab_size * model.hidden
