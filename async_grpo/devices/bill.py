"""The memory that each process of a run will hold, line by line, before it starts. Pure.

A trainer rank holds:

    held          masters, gradients, moments, gathered weights: all the time
    activations   from the forward of a minibatch to its backward pass
    working       the temporary tensors at the largest moment of the backward pass

Legend: P parameters, t those that train beside a frozen model (an adapter's), R ranks of a group
of shards, D devices that share an engine, T tokens of a minibatch or of one forward, N sequences at
a time, L layers, H hidden size, I size of the MLP, Q and K widths of queries and of keys, V
vocabulary, C tokens of a chunk of logits, e bytes of one value of weights and activations.
Activations are those of a decoder with a gated MLP; layers without a gate keep a little
less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

FLOAT32 = 4
MIB, GIB = 2**20, 2**30
# Options with which rollout/engine_args.py starts engines.
CPU_KV_CACHE_BYTES = 256 * MIB
CPU_BATCHED_TOKENS = 4096
WHOLE_SHARE = 0.92  # of a device that vLLM has alone: vLLM's default
KV_BLOCK_TOKENS = 32  # the least: prompts share whole blocks, and a sequence may waste one

# Of a frozen weight that is packed: bits of a number, and numbers that share a float32 scale.
PACKED_BITS = {"nf4": 4, "int8": 8}
PACKED_BLOCK = 64
OF_LOGITS = 3  # float32 copies of a row: logits, logits over temperature, log-softmax
GRAPHS_BYTES = 3 * GIB // 2  # CUDA's context and graphs of an engine, an assumption
OUTPUT_BYTES = 16  # of an output token in a request: id, log-probability, version


@dataclass(frozen=True, slots=True)
class TrainedShare:
    """What trains beside a model that is frozen: an adapter, and modules as a whole."""

    num_parameters: int
    layer_parameters: int  # most of them in one layer
    token_values: int  # numbers between the factors of one layer's adapters, of a token
    root_parameters: int  # of them, those outside of layers
    touched_parameters: int  # of the model, whose values in engines the adapter changes
    frozen_bytes: int = FLOAT32  # of one number of the frozen model
    trains_head: bool = False
    packed_parameters: int = 0  # of the frozen model, in `packs`
    packs: str = "none"
    unpacked_values: int = 0  # of the largest packed weight

    @property
    def packed_bytes(self) -> int:
        """Of all packed weights, which every rank has."""
        bits = PACKED_BITS.get(self.packs, 0)
        return self.packed_parameters * bits // 8 + FLOAT32 * self.packed_parameters // PACKED_BLOCK


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model from which bills are computed."""

    num_parameters: int
    layer_parameters: int  # of the largest layer, a unit of sharding
    root_parameters: int  # outside of layers: embedding, head, last norm
    num_layers: int
    hidden: int
    intermediate: int
    query_width: int  # heads * head size
    key_width: int  # heads of keys * head size; of values as well
    num_heads: int
    vocab_size: int
    norms_heads: bool = False  # queries and keys are normalised
    trained: TrainedShare | None = None  # None: all of it trains

    @property
    def num_trained(self) -> int:
        return self.trained.num_parameters if self.trained else self.num_parameters

    @property
    def trained_layer(self) -> int:
        """Most trained parameters of one layer."""
        return self.trained.layer_parameters if self.trained else self.layer_parameters

    @property
    def trained_root(self) -> int:
        return self.trained.root_parameters if self.trained else self.root_parameters

    @property
    def trained_head(self) -> int:
        """Parameters of the output layer, if it trains."""
        is_trained = self.trained is None or self.trained.trains_head
        return self.vocab_size * self.hidden * is_trained


@dataclass(frozen=True, slots=True)
class Training:
    """How a rank trains, as its bill depends on it."""

    shard_ranks: int = 1
    moment_ranks: int = 0  # that divide AdamW's moments; 0: those that share the model
    num_tokens: int = 16384  # of a minibatch
    chunk_tokens: int = 1024  # whose logits exist at a time
    compute_bytes: int = FLOAT32  # of one value in the compute dtype
    keeps_gathered: bool = False
    checkpointing: int = (
        0  # one layer in so many, from the first, recomputes its activations; 0: none
    )
    defers: bool = False  # gradients stay unsharded until the end of the step
    keeps_old_policy: bool = False
    keeps_first_policy: bool = False
    offload: str = "none"  # none, optimizer, parameters
    moment_bytes: float = FLOAT32  # of one number of a moment
    pages_moments: bool = False  # they move to the host where a device has too little


@dataclass(frozen=True, slots=True)
class Line:
    """One kind of memory of a process."""

    name: str
    num_bytes: int
    formula: str
    on_host: bool = False  # in host memory, though the process computes on a device


@dataclass(frozen=True, slots=True)
class Bill:
    """The memory of a process when it holds most."""

    lines: tuple[Line, ...] = ()

    @property
    def total(self) -> int:
        """Bytes where the process computes, without those on the host beside a device."""
        return sum(line.num_bytes for line in self.lines if not line.on_host)

    @property
    def on_host(self) -> int:
        return sum(line.num_bytes for line in self.lines if line.on_host)

    def plus(self, *lines: Line) -> Bill:
        """The bill with further lines, of which empty ones are left out."""
        return Bill((*self.lines, *(line for line in lines if line.num_bytes)))

    def in_words(self) -> str:
        """The bill of a rank for the log, one row a line."""
        rows = [
            f"  {line.num_bytes / MIB:9,.1f} MiB  {line.name}"
            f"{' in the host' if line.on_host else ''}: {line.formula}"
            for line in self.lines
        ]
        return "\n".join((f"memory of a trainer rank: {self.total / MIB:,.1f} MiB", *rows))


def trainer_bill(model: ModelShape, training: Training) -> Bill:
    """The bill of one rank from its second step on, when AdamW has its moments."""
    working = _working(model, training)
    return Bill().plus(*_held(model, training), *_activations(model, training), working)


def with_checkpointing_if_needed(
    model: ModelShape, training: Training, *, free_bytes: int
) -> Training:
    """`training` with `checkpointing` of as few layers as make its bill fit into `free_bytes`.

    Of all layers where that is not enough either.
    """
    for one_in in (0, *range(model.num_layers, 0, -1)):
        training = replace(training, checkpointing=one_in)
        if trainer_bill(model, training).total <= free_bytes:
            break
    return training


def _held(model: ModelShape, training: Training) -> tuple[Line, ...]:
    trained, beside = model.num_trained, model.trained
    letter, ranks = "t" if beside else "P", f"{training.shard_ranks} ranks"
    own, of_own = ceil(trained / training.shard_ranks) * FLOAT32, f"4 {letter} / {ranks}"
    frozen, packed = (beside.frozen_bytes, beside.packed_parameters) if beside else (0, 0)
    unpacked = training.compute_bytes * (beside.unpacked_values if beside else 0)
    over = training.moment_ranks or training.shard_ranks
    each = 2 * training.moment_bytes
    moments, of_moments = ceil(each * ceil(trained / over)), f"{each:g} {letter} / {over} ranks"
    moves = training.offload == "parameters"
    steps = training.offload != "none" or training.pages_moments
    gathered = training.compute_bytes * (model.root_parameters + model.trained_root * bool(beside))
    layers = model.num_layers if training.keeps_gathered else 2  # one, and the next on its way
    of_layer = model.layer_parameters + model.trained_layer * bool(beside)
    of_layer -= packed // model.num_layers
    gathered_layers = training.compute_bytes * of_layer * layers
    whole = FLOAT32 * trained if training.defers else 0
    copies = moments if training.offload == "optimizer" else 0
    return (
        Line("the frozen model",
             frozen * ceil((model.num_parameters - packed) / training.shard_ranks),
             f"{frozen} P / {ranks}", moves),
        Line("packed weights", beside.packed_bytes if beside else 0, "all of them on each rank"),
        Line("an unpacked weight", unpacked, "e of the largest"),
        Line("master weights", own, of_own, moves),
        Line("gradients", own, of_own, moves),
        Line("AdamW's moments", moments, of_moments, steps),
        Line("copies that AdamW steps on", copies, of_moments, True),
        Line("the old policy", own if training.keeps_old_policy else 0, of_own, moves),
        Line("the first policy", own if training.keeps_first_policy else 0, of_own, moves),
        Line("whole gradients that wait", whole, f"4 {letter}"),
        Line("gathered embedding and head", gathered, "e of their parameters"),
        Line("gathered layers", gathered_layers, f"e of {layers} layers' parameters"),
    )  # fmt: skip


def _activations(model: ModelShape, training: Training) -> tuple[Line, ...]:
    """Activations of all layers, or inputs in place of those that are recomputed, one at a time."""
    tokens, size = training.num_tokens, training.compute_bytes
    layer = tokens * layer_token_bytes(model, size)
    ends = tokens * model.hidden * (FLOAT32 + 4 * size)  # last norm, head's input and its gradient
    last = Line("last hidden states", ends, "T H (4 + 4 e)")
    if training.checkpointing:
        count, one_in = model.num_layers, training.checkpointing
        recomputed = ceil(count / one_in)
        inputs = tokens * model.hidden * size * recomputed
        # Those behind the last one that recomputes its own are freed before it does.
        held = count - recomputed + ((count - 1) % one_in == 0)
        own = Line(
            "layers' activations at a time", layer * held, f"of {held} layers, one recomputed"
        )
        return Line("layers' inputs", inputs, f"e T H of {recomputed} layers"), own, last
    of_norms = f" + {2 * (FLOAT32 + (1 if model.trained else 2) * size)} H"
    of_norms += f" + {size} of {model.trained.token_values} ranks" if model.trained else ""
    formula = f"{layer_token_bytes(model, size)} bytes a token and layer: e (3 Q + 2 K + 4 I)"
    return Line("layers' activations", layer * model.num_layers, formula + of_norms), last


def layer_token_bytes(model: ModelShape, size: int) -> int:
    """Bytes that one layer keeps of one token for its backward pass, at `size` bytes a value.

    Each of two norms keeps its input in float32 (of a model in float32 the residual itself), the
    normalised input unless it is frozen, and its output. Attention keeps queries, keys, values, the
    heads' output twice, and a normaliser for each head; the MLP keeps gate, its activation, up, and
    their product. An adapter keeps its layers' inputs, as if these trained (of all: with adapters
    of some it is less), and what is between its factors.
    """
    normalised = size * (model.trained is None)
    between = size * model.trained.token_values if model.trained else 0
    norms = 2 * model.hidden * (FLOAT32 + normalised + size)
    of_heads = (model.query_width + model.key_width) * (FLOAT32 + normalised) * model.norms_heads
    attention = size * (3 * model.query_width + 2 * model.key_width) + FLOAT32 * model.num_heads
    return norms + of_heads + attention + 4 * size * model.intermediate + between


def _working(model: ModelShape, training: Training) -> Line:
    """The largest of three: the head's backward pass, a layer's, and the root's reduction."""
    size, tokens = training.compute_bytes, training.num_tokens
    casts = size if size < FLOAT32 else 0
    chunk = min(training.chunk_tokens, tokens) * model.vocab_size
    head = model.trained_head
    of_head, waits = (f" + H V {FLOAT32 + casts}", "e H V + ") if head else ("", "")
    at_head = Line(
        "the head's backward pass",
        chunk * (2 * FLOAT32 + casts) + head * (FLOAT32 + casts),
        f"C V {2 * FLOAT32 + casts}{of_head}",
    )
    reduced = size + 2 * FLOAT32  # a gradient, and the buffers of its reduction
    at_layer = Line(
        "a layer's backward pass",
        head * size + model.trained_layer * reduced + 3 * size * tokens * model.intermediate,
        f"{waits}{reduced} of a layer's parameters + 3 e T I",
    )
    # By then the activations of the layers are freed, and the gradient of the embedding is new.
    new = head * size * 2 + model.trained_root * FLOAT32
    gone = sum(line.num_bytes for line in _activations(model, training))
    formula = "2 e H V + 4 of the root's parameters, less the activations"
    at_end = Line("the root's reduction", new - gone, formula)
    return max((at_head, at_layer, at_end), key=lambda line: line.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The sizes of a generation worker's engine from which its bill is computed."""

    devices: int = 1  # that share the engine
    bytes_of_number: int = 2  # of one value of weights and caches
    batched_tokens: int = 8192  # of one step
    num_seqs: int = 256
    longest: int = 4096  # tokens of prompt and output
    cache_bytes: int = 0  # on each device; 0: all that is left of `may_take`
    may_take: int = 0  # bytes of each device that vLLM may use; 0: the engine is on CPUs
    received: int = 0  # numbers of a version of the weights; 0: all of the model's
    adapters: int = 0  # numbers of all adapters that it has room for

    @property
    def on_cpu(self) -> bool:
        return not self.may_take


def engine_bill(model: ModelShape, engine: Engine) -> Bill:
    """The bill of one device of an engine, with the host memory of its worker."""
    given = "given" if engine.cache_bytes else "what is left"
    token = ceil(cached_token_bytes(model, engine.bytes_of_number) / engine.devices)
    held = OUTPUT_BYTES * engine.num_seqs * engine.longest
    return Bill().plus(
        *_beside_cache(model, engine),
        Line("keys and values", cache_bytes(model, engine), f"{given}, 2 L K e / D = {token} B"
             " a token"),
        Line("staged weights", (engine.received or model.num_parameters) * engine.bytes_of_number,
             "e P", on_host=True),
        Line("outputs held", held, f"{OUTPUT_BYTES} a token of N sequences", on_host=True),
    )  # fmt: skip


def cached_token_bytes(model: ModelShape, size: int) -> int:
    """Bytes of one token's keys and values in all layers, at `size` bytes a value."""
    return 2 * model.num_layers * model.key_width * size


def cache_bytes(model: ModelShape, engine: Engine) -> int:
    """Bytes of each device for keys and values."""
    taken = sum(line.num_bytes for line in _beside_cache(model, engine))
    return engine.cache_bytes or max(0, engine.may_take - taken)


def cached_tokens(model: ModelShape, engine: Engine) -> int:
    """Tokens whose keys and values all devices of an engine hold together."""
    token = cached_token_bytes(model, engine.bytes_of_number)
    return engine.devices * cache_bytes(model, engine) // token


def missing_bytes(model: ModelShape, engine: Engine) -> int:
    """Bytes that each device lacks to hold one sequence of the longest length; 0: none."""
    if engine.on_cpu:
        return 0
    token = cached_token_bytes(model, engine.bytes_of_number) / engine.devices
    needed = sum(line.num_bytes for line in _beside_cache(model, engine))
    return max(0, needed + max(engine.cache_bytes, ceil(engine.longest * token)) - engine.may_take)


def cache_of_cpu(*, longest: int, token_bytes: int) -> int:
    """Bytes of cache for an engine on a CPU; by itself vLLM would take nearly all memory.

    One sequence of the longest length fits: vLLM refuses to start with less.
    """
    return max(CPU_KV_CACHE_BYTES, (longest + 2 * KV_BLOCK_TOKENS) * token_bytes)


def batched_on_cpu(longest: int) -> int:
    """Prompt tokens of one step of an engine on a CPU, which does not split prompts."""
    return max(longest, CPU_BATCHED_TOKENS)


def _beside_cache(model: ModelShape, engine: Engine) -> tuple[Line, ...]:
    """The memory of one device of an engine, without keys and values."""
    size, tokens, parts = engine.bytes_of_number, engine.batched_tokens, engine.devices
    widest = max(3 * model.intermediate, model.query_width + 2 * model.key_width)
    logits = OF_LOGITS * FLOAT32
    return (
        Line("weights", ceil(model.num_parameters * size / parts), f"e P / {parts} devices"),
        Line("adapters", ceil(engine.adapters * size / parts), "e t of --max-loras adapters"),
        # vLLM packs a copy of the head for oneDNN, beside the tied embedding.
        Line("packed head", size * model.hidden * model.vocab_size * engine.on_cpu, "e H V"),
        Line("activations", size * tokens * (2 * model.hidden + ceil(widest / parts)),
             "e T (2 H + 3 I / D)"),
        Line("logits", logits * engine.num_seqs * model.vocab_size, f"{logits} N V"),
        Line("CUDA's context and graphs", GRAPHS_BYTES * (not engine.on_cpu), "assumed"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The sizes of a reference or teacher worker from which its bill is computed."""

    bytes_of_number: int = 2  # of one value of weights and activations
    num_tokens: int = 16384  # of one packed forward
    chunk_tokens: int = 1024
    is_updated: bool = False  # the policy's weights replace the worker's now and then
    ranks: int = 1  # that share the model, each with a forward of its own


def scorer_bill(model: ModelShape, scoring: Scoring) -> Bill:
    """The bill of each rank of a scoring worker, which computes forward passes alone.

    Of a sharded model a rank also holds what FSDP2 has gathered: two layers, embedding and head.
    """
    size, tokens = scoring.bytes_of_number, scoring.num_tokens
    widest = max(3 * model.intermediate, 3 * model.query_width + 2 * model.key_width)
    chunk = min(scoring.chunk_tokens, tokens) * model.vocab_size
    parts, whole = scoring.ranks, 2 * model.layer_parameters + model.root_parameters
    new = ceil(model.num_parameters * size * scoring.is_updated / parts)  # one copy serves all
    return Bill().plus(
        Line("weights", ceil(model.num_parameters * size / parts), f"e P / {parts} ranks"),
        Line("gathered weights", size * whole * (parts > 1), "e (two layers, and the root)"),
        Line("activations", tokens * (size * widest + 12 * model.hidden), "T (3 e I + 12 H)"),
        Line("logits", 2 * FLOAT32 * chunk, "8 C V"),
        Line("new weights", new, f"e P / {parts} ranks during an update", on_host=True),
    )
