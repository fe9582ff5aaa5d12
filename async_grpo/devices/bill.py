"""What a trainer's rank holds in memory, line by line, before it is there. Pure.

    held          masters, gradients, moments, gathered weights: all the time
    activations   from the forward of a minibatch to its backward pass
    working       what the largest moment of the backward pass needs besides

Legend: P parameters, R ranks of a group of shards, T tokens of a minibatch, L layers, H hidden
size, I size of the MLP, Q and K widths of queries and of keys, V vocabulary, C tokens of a chunk of
logits, e bytes of the compute type. Activations are those of a decoder with a gated MLP, as most
are; its layers keep a little less where they have no gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

FLOAT32 = 4
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a bill needs to know of a model."""

    num_parameters: int
    layer_parameters: int  # of the largest layer, a unit of sharding
    root_parameters: int  # of all that is in no layer: embedding, head, last norm
    num_layers: int
    hidden: int
    intermediate: int
    query_width: int  # heads * head size
    key_width: int  # of keys, and of values
    num_heads: int
    vocab_size: int
    norms_heads: bool = False  # queries and keys have norms of their own


@dataclass(frozen=True, slots=True)
class Training:
    """What a bill needs to know of how a rank trains."""

    shard_ranks: int = 1
    num_tokens: int = 16384  # of a minibatch
    chunk_tokens: int = 1024  # whose logits exist at a time
    compute_bytes: int = FLOAT32  # of a number of the compute type
    keeps_gathered: bool = False
    checkpointing: bool = False
    defers: bool = False  # whole gradients wait for the end of the step
    keeps_old_policy: bool = False
    offload: str = "none"  # none, optimizer, parameters


@dataclass(frozen=True, slots=True)
class Line:
    """One kind of memory."""

    name: str
    num_bytes: int
    formula: str
    on_host: bool = False  # of a rank that computes on a device


@dataclass(frozen=True, slots=True)
class Bill:
    """All that a process holds at its largest moment."""

    who: str
    lines: tuple[Line, ...]

    @property
    def total(self) -> int:
        """Where it computes; what is offloaded to the host is not in it."""
        return sum(line.num_bytes for line in self.lines if not line.on_host)

    @property
    def on_host(self) -> int:
        return sum(line.num_bytes for line in self.lines if line.on_host)

    def in_words(self) -> str:
        """A line each, for the log."""
        rows = [
            f"  {line.num_bytes / MIB:9,.1f} MiB  {line.name}"
            f"{' in the host' if line.on_host else ''}: {line.formula}"
            for line in self.lines
            if line.num_bytes
        ]
        return "\n".join((f"memory of {self.who}: {self.total / MIB:,.1f} MiB", *rows))


def trainer_bill(model: ModelShape, training: Training) -> Bill:
    """Of one rank from its second step on, when AdamW has its moments."""
    lines = (*_held(model, training), *_activations(model, training), _working(model, training))
    return Bill("a trainer rank", tuple(line for line in lines if line.num_bytes))


def with_checkpointing_if_needed(
    model: ModelShape, training: Training, *, free_bytes: int
) -> Training:
    """The same with `checkpointing` only where its bill is more than `free_bytes` without."""
    plain = replace(training, checkpointing=False)
    return replace(plain, checkpointing=trainer_bill(model, plain).total > free_bytes)


def _held(model: ModelShape, training: Training) -> Sequence[Line]:
    own = ceil(model.num_parameters / training.shard_ranks) * FLOAT32
    divided = f"P / {training.shard_ranks} ranks"
    moves, steps = training.offload == "parameters", training.offload != "none"
    gathered = training.compute_bytes * model.root_parameters
    layers = model.num_layers if training.keeps_gathered else 2  # one, and the next on its way
    whole = FLOAT32 * model.num_parameters if training.defers else 0
    copies = 2 * own if training.offload == "optimizer" else 0
    return (
        Line("master weights", own, f"4 {divided}", moves),
        Line("gradients", own, f"4 {divided}", moves),
        Line("AdamW's moments", 2 * own, f"8 {divided}", steps),
        Line("copies that AdamW steps on", copies, f"8 {divided}", True),
        Line("the old policy", own if training.keeps_old_policy else 0, f"4 {divided}", moves),
        Line("whole gradients that wait", whole, "4 P"),
        Line("gathered embedding and head", gathered, "e of their parameters"),
        Line(
            "gathered layers",
            training.compute_bytes * model.layer_parameters * layers,
            f"e of {layers} layers' parameters",
        ),
    )


def _activations(model: ModelShape, training: Training) -> Sequence[Line]:
    """Which hidden states, and of which layers everything."""
    tokens, size = training.num_tokens, training.compute_bytes
    layer = tokens * layer_token_bytes(model, size)
    ends = tokens * model.hidden * (FLOAT32 + 4 * size)  # last norm, head's input and its gradient
    if training.checkpointing:
        inputs = tokens * model.hidden * size * model.num_layers
        return (
            Line("layers' inputs", inputs, "e T L H"),
            Line("one layer's activations, recomputed", layer, "see layers' activations"),
            Line("last hidden states", ends, "T H (4 + 4 e)"),
        )
    every = layer * model.num_layers
    formula = f"{layer_token_bytes(model, size)} bytes a token and layer: e (3 Q + 2 K + 4 I)" + (
        " + 24 H" if size == FLOAT32 else " + 16 H"
    )
    return (
        Line("layers' activations", every, formula),
        Line("last hidden states", ends, "T H (4 + 4 e)"),
    )


def layer_token_bytes(model: ModelShape, size: int) -> int:
    """What one layer keeps of one token for its backward pass, with numbers of `size` bytes.

    Each of two norms: its input in float32, what it normalised, its output; in float32 the same
    with the residual's. Queries, keys, values, the heads' output twice, a normaliser a head. Of the
    MLP: gate, its activation, up, and their product.
    """
    norms = 2 * model.hidden * (FLOAT32 + 2 * size)
    of_heads = (model.query_width + model.key_width) * (FLOAT32 + size) * model.norms_heads
    attention = size * (3 * model.query_width + 2 * model.key_width) + FLOAT32 * model.num_heads
    return norms + of_heads + attention + 4 * size * model.intermediate


def _working(model: ModelShape, training: Training) -> Line:
    """The largest of three moments: the head's backward pass, a layer's, and the root's end."""
    size, tokens = training.compute_bytes, training.num_tokens
    casts = size if size < FLOAT32 else 0
    chunk = min(training.chunk_tokens, tokens) * model.vocab_size
    head = model.vocab_size * model.hidden
    at_head = Line(
        "the head's backward pass",
        chunk * (2 * FLOAT32 + casts) + head * (FLOAT32 + casts),
        f"C V {2 * FLOAT32 + casts} + H V {FLOAT32 + casts}",
    )
    reduced = size + 2 * FLOAT32  # a gradient, and what reduces it
    at_layer = Line(
        "a layer's backward pass",
        head * size + model.layer_parameters * reduced + 3 * size * tokens * model.intermediate,
        f"e H V + {reduced} of a layer's parameters + 3 e T I",
    )
    # The activations of the layers are gone by then, the gradient of the embedding is new.
    new = head * size * 2 + model.root_parameters * FLOAT32
    gone = sum(line.num_bytes for line in _activations(model, training))
    formula = "2 e H V + 4 of the root's parameters, less the activations"
    at_end = Line("the root's reduction", new - gone, formula)
    return max((at_head, at_layer, at_end), key=lambda line: line.num_bytes)
