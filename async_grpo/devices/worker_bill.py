"""What engines and workers that score hold in memory, line by line, before they are there. Pure.

Legend: P parameters, D devices that share an engine, T tokens of one forward, N sequences at a
time, L layers, H hidden size, I size of the MLP, Q and K widths of queries and of keys, V
vocabulary, C tokens of a chunk of logits, e bytes of a number of weights and activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from async_grpo.devices.bill import FLOAT32, GIB, MIB, Bill, Line, ModelShape

# What engines are started with: rollout/engine_args.py.
CPU_KV_CACHE_BYTES = 256 * MIB
CPU_BATCHED_TOKENS = 4096  # prompt tokens of one engine step
WHOLE_SHARE = 0.92  # of a device that vLLM has for itself: its own default
KV_BLOCK_TOKENS = 32  # the least: prompts share whole blocks, and a sequence may waste one

OF_LOGITS = 3  # float32 copies of a row: logits, at the temperature, their log-softmax
GRAPHS_BYTES = 3 * GIB // 2  # CUDA's context and graphs of an engine, an assumption
OUTPUT_BYTES = 16  # of a token in a request: id, log-probability, version


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What a bill needs to know of a generation worker's engine."""

    devices: int = 1  # that share it
    bytes_of_number: int = 2
    batched_tokens: int = 8192  # of one step
    num_seqs: int = 256
    longest: int = 4096  # tokens of prompt and output
    cache_bytes: int = 0  # of each device, given; 0: what is left of `may_take`
    may_take: int = 0  # bytes of a device; 0: on a CPU
    keeps_staged: bool = False  # the file of weights, for those that change alone

    @property
    def on_cpu(self) -> bool:
        return not self.may_take


def engine_bill(model: ModelShape, engine: Engine) -> Bill:
    """Of one device of an engine; with the host memory of its worker."""
    given = "given" if engine.cache_bytes else "what is left"
    token = ceil(cached_token_bytes(model, engine.bytes_of_number) / engine.devices)
    staged = "kept for --weight-delta" if engine.keeps_staged else "during an update"
    held = OUTPUT_BYTES * engine.num_seqs * engine.longest
    lines = (
        *_beside_cache(model, engine),
        Line("keys and values", cache_bytes(model, engine), f"{given}, 2 L K e / D = {token} B"
             " a token"),
        Line("staged weights", model.num_parameters * engine.bytes_of_number, f"e P, {staged}",
             on_host=True),
        Line("outputs held", held, f"{OUTPUT_BYTES} a token of N sequences", on_host=True),
    )  # fmt: skip
    return Bill("a generation worker", tuple(line for line in lines if line.num_bytes))


def cached_token_bytes(model: ModelShape, size: int) -> int:
    """Keys and values of one token in all layers, of `size` bytes a number."""
    return 2 * model.num_layers * model.key_width * size


def cache_bytes(model: ModelShape, engine: Engine) -> int:
    """Of each device, for keys and values."""
    taken = sum(line.num_bytes for line in _beside_cache(model, engine))
    return engine.cache_bytes or max(0, engine.may_take - taken)


def cached_tokens(model: ModelShape, engine: Engine) -> int:
    """That all devices of an engine can hold together."""
    token = cached_token_bytes(model, engine.bytes_of_number)
    return engine.devices * cache_bytes(model, engine) // token


def missing_bytes(model: ModelShape, engine: Engine) -> int:
    """Of each device, that an engine lacks to hold one sequence of the longest length; or 0."""
    if not engine.may_take:
        return 0
    token = cached_token_bytes(model, engine.bytes_of_number) / engine.devices
    needed = sum(line.num_bytes for line in _beside_cache(model, engine))
    return max(0, needed + max(engine.cache_bytes, ceil(engine.longest * token)) - engine.may_take)


def longest_sequence_bytes(*, longest: int, token_bytes: int) -> int:
    """Cache that one sequence of the longest length needs; vLLM refuses to start with less."""
    return (longest + 2 * KV_BLOCK_TOKENS) * token_bytes


def _beside_cache(model: ModelShape, engine: Engine) -> tuple[Line, ...]:
    size, tokens, parts = engine.bytes_of_number, engine.batched_tokens, engine.devices
    widest = max(3 * model.intermediate, model.query_width + 2 * model.key_width)
    logits = OF_LOGITS * FLOAT32
    return (
        Line("weights", ceil(model.num_parameters * size / parts), f"e P / {parts} devices"),
        # vLLM packs the head for oneDNN, and leaves the tied embedding as it is.
        Line("packed head", size * model.hidden * model.vocab_size * engine.on_cpu, "e H V"),
        Line("activations", size * tokens * (2 * model.hidden + ceil(widest / parts)),
             "e T (2 H + 3 I / D)"),
        Line("logits", logits * engine.num_seqs * model.vocab_size, f"{logits} N V"),
        Line("CUDA's context and graphs", GRAPHS_BYTES * (not engine.on_cpu), "assumed"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What a bill needs to know of a reference or teacher worker."""

    bytes_of_number: int = 2
    num_tokens: int = 16384  # of one packed forward
    chunk_tokens: int = 1024
    is_updated: bool = False  # with the policy's weights, now and then


def scorer_bill(model: ModelShape, scoring: Scoring) -> Bill:
    """Of one worker, which computes forward alone."""
    size, tokens = scoring.bytes_of_number, scoring.num_tokens
    widest = max(3 * model.intermediate, 3 * model.query_width + 2 * model.key_width)
    chunk = min(scoring.chunk_tokens, tokens) * model.vocab_size
    new = model.num_parameters * size * scoring.is_updated
    lines = (
        Line("weights", model.num_parameters * size, "e P"),
        Line("activations", tokens * (size * widest + 12 * model.hidden), "T (3 e I + 12 H)"),
        Line("logits", 2 * FLOAT32 * chunk, "8 C V"),
        Line("new weights", new, "e P during an update", on_host=True),
    )
    return Bill("a scoring worker", tuple(line for line in lines if line.num_bytes))
