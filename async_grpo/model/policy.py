"""The policy: one forward from a packed minibatch to log-probabilities, and its cost.

Trainer, reference and evaluation use this module, so that they cannot disagree. The cost in
arithmetic and memory follows from shapes alone: no weights are read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from async_grpo.devices.bill import ModelShape, TrainedShare
from async_grpo.model.attention import PACKED
from async_grpo.model.experts import Routing
from async_grpo.model.lm_head import Head, rescaling_of
from async_grpo.model.logprobs import HeadTerm, TokenLogprobs, token_logprobs
from async_grpo.model.model_folder import read_config
from async_grpo.model.packed_linear import packed_layers, packed_weights
from async_grpo.types import PackedMinibatch

if TYPE_CHECKING:
    from peft import LoraConfig


class PolicyModel(nn.Module):
    """A causal language model whose head runs in chunks within the root's forward.

    FSDP2 gathers the root's parameters (embedding and head) only there.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._rescaling = rescaling_of(model.config)
        self._mixers = [(layer, each) for layer in self.layers for each in _mixers_of(layer)]
        self._sees_alone = False
        # Where sequences share tokens: of so many in all, a layer keeps gathered keys and values.
        self.gathered_tokens = sys.maxsize
        self.compile_logprobs = False  # compile what is computed of each chunk's logits
        self.routing = Routing.of(model)  # None: no mixture of experts
        self.adapter: LoraConfig | None = None  # what trains, where not all does

    def forward(
        self,
        packed: PackedMinibatch,
        *,
        temperature: float,
        chunk_size: int,
        terms: Sequence[HeadTerm] = (),
    ) -> TokenLogprobs:
        """Score `packed.target_ids` [N]; logits exist for `chunk_size` tokens at a time."""
        return token_logprobs(
            self.hidden_states(packed),
            self.head,
            packed.target_ids,
            temperature=temperature,
            chunk_size=chunk_size,
            compile=self.compile_logprobs,
            terms=terms,
            rows=packed.scores,
        )

    def hidden_states(self, packed: PackedMinibatch) -> Tensor:
        """The last hidden states [N, H], of which the head predicts `packed.target_ids`."""
        if packed.repeat_index is not None and not self.shares_prompts:
            raise ValueError(f"prompts may be shared with {PACKED} attention only: collate without")
        if self.routing is not None:
            self.routing.begin(packed)
        whole = packed.repeat_index
        gathers_again = whole is not None and len(whole) > self.gathered_tokens
        states: Tensor = self.model.base_model(
            input_ids=packed.input_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,  # with a cache, transformers lets packed sequences see each other
            cu_seq_lens_q=packed.cu_seqlens,
            cu_seq_lens_k=packed.cu_seqlens,
            max_length_q=packed.max_seqlen,
            max_length_k=packed.max_seqlen,
            seq_idx=_sequence_of(packed),
            repeat_index=packed.repeat_index,
            first_index=packed.first_index,
            gathers_again=gathers_again,
            is_trie=packed.is_trie,
        ).last_hidden_state[0]
        # Some models keep the states between their layers in float32, whatever their type.
        return states.index_select(0, packed.logit_positions).to(self.head.weight.dtype)

    def see_sequences_alone(self) -> bool:
        """Give each mixer that carries a state every sequence apart; False if there is none."""
        self._sees_alone = bool(self._mixers)
        for layer, mixer in self._mixers:
            SequencesAlone(layer, mixer)
        return self._sees_alone

    @property
    def head(self) -> Head:
        """The output layer; under FSDP2 its tensors are whole within a forward only."""
        linear = self.model.get_output_embeddings()
        if self.adapter is not None and hasattr(linear, "modules_to_save"):  # trained as a whole
            [linear] = linear.modules_to_save.values()
        return Head(linear.weight, getattr(linear, "bias", None), self._rescaling)

    @property
    def shares_prompts(self) -> bool:
        """Whether `forward` accepts minibatches in which sequences share what they begin with."""
        packs = self._sees_alone or not self._mixers
        return packs and bool(self.model.config._attn_implementation == PACKED)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order: the units of sharding, checkpointing and compilation."""
        names = set(self.model._no_split_modules or ())
        # FSDP2 and compilation put FSDP in front of the name of a class.
        modules = self.model.modules()
        return [m for m in modules if type(m).__name__.removeprefix("FSDP") in names]


class SequencesAlone:
    """Takes the place of a mixer's forward, and calls it with the row's sequences side by side.

    Those of one length go together, each a batch entry of its own: kernels in torch alone spend
    most of their time on calls.

    Not every model hands its mixers the borders of sequences, but all hand them to their layers:
    these note them before each forward, also when the backward pass repeats it.
    """

    def __init__(self, layer: nn.Module, mixer: nn.Module) -> None:
        self._forward = mixer.forward
        self._row: Mapping[str, Any] = {}
        layer.register_forward_pre_hook(self._note, with_kwargs=True)
        mixer.forward = self

    def _note(self, layer: nn.Module, args: object, kwargs: Mapping[str, Any]) -> None:
        self._row = {name: kwargs.get(name) for name in OF_ROWS}

    @torch.compiler.disable  # lengths differ in every row: compiling would never end
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hidden_states [1, T, H]; returns the same shape."""
        row, others = self._row, {n: v for n, v in kwargs.items() if n not in OF_ROWS}
        if row["cu_seq_lens_q"] is None:
            raise ValueError("a mixer that carries a state needs its row's borders: pack without")
        if row["repeat_index"] is not None:
            hidden_states = hidden_states.index_select(1, row["repeat_index"])
        lengths: list[int] = row["cu_seq_lens_q"].diff().tolist()
        parts = list(hidden_states.split(lengths, dim=1))
        for length in set(lengths):
            alike = [index for index, other in enumerate(lengths) if other == length]
            together = torch.cat([parts[index] for index in alike])
            for index, part in zip(alike, self._forward(together, *args, **others), strict=True):
                parts[index] = part[None]
        states, first = torch.cat(parts, dim=1), row["first_index"]
        return states if first is None else states.index_select(1, first)


# What a packed row tells of its sequences, besides the tokens.
OF_ROWS = (
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
    "repeat_index", "first_index", "gathers_again", "is_trie",
)  # fmt: skip


def _mixers_of(module: nn.Module) -> list[nn.Module]:
    """Those that carry a state along a row: gated delta rules, Mamba and short convolutions.

    All of these have a convolution of their own.
    """
    return [
        each
        for each in module.modules()
        if any(isinstance(child, nn.Conv1d) for child in each.children())
    ]


def _sequence_of(packed: PackedMinibatch) -> Tensor | None:
    """[1, T] int32, the sequence of each token, for kernels that carry states; None: shared."""
    if packed.repeat_index is not None:
        return None
    lengths = packed.cu_seqlens.diff()
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    return numbers.repeat_interleave(lengths, output_size=len(packed.input_ids))[None]


def hf_named_parameters(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) as a Hugging Face checkpoint names them; a tied head is not repeated.

    With an adapter: those of the frozen model.
    """
    for name, parameter in policy.model.named_parameters():
        if policy.adapter is None:
            yield name, parameter
        elif not parameter.requires_grad:
            yield name.replace(".base_layer", "").replace(".original_module", ""), parameter


def trained_parameters(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) of those that train, by the names of a checkpoint or of peft's layers."""
    named = policy.model.named_parameters()
    return ((name, parameter) for name, parameter in named if parameter.requires_grad)


def as_stored(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A parameter as the files of a checkpoint have it, {name: view or copy}.

    transformers joins the experts of a layer, and renames some parameters; files, and engines, have
    one tensor an expert and projection.
    """
    return dict(revert_weight_conversion(model, {name: tensor}))


def stored_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint has, such as the corrections of a router's scores."""
    known = model.state_dict(keep_vars=True)
    return ((name, each) for name, each in model.named_buffers() if name in known)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers that determine the FLOPs of a forward pass."""

    num_parameters: int  # in a token's products: with the output layer, without the embedding
    head_parameters: int  # of these, those of the output layer, used by scored tokens alone
    num_layers: int  # that attend
    attention_width: int  # heads * head size
    frozen_parameters: int = 0  # of `num_parameters`, those that do not train
    frozen_head: int = 0  # of `head_parameters`
    windows: tuple[int, ...] = ()  # tokens that a token attends to at most, by windowed layer
    has_states: bool = False  # some layers carry a state along a sequence


ATTENDS = "sliding_attention"  # of a config without kinds of layers, if it has a window
WITHOUT_ATTENTION = {"linear_attention", "conv", "mamba", "mlp", "moe"}  # kinds of layers


def read_size(path: str) -> ModelSize:
    """The size of the model in a folder that `check_model_folder` has accepted."""
    config = read_config(Path(path))
    with torch.device("meta"):  # shapes without memory
        return size_of(AutoModelForCausalLM.from_config(config))


def size_of(model: PreTrainedModel) -> ModelSize:
    """The size of a model, sharded or not."""
    config = model.config
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    body = {True: 0.0, False: 0.0}  # by whether they train
    for parameter, share in _active(model):
        if parameter is not embedding and parameter is not output:
            body[parameter.requires_grad] += parameter.numel() * share
    frozen_head = output.numel() * (not output.requires_grad)
    kinds = getattr(config, "layer_types", None) or [ATTENDS] * config.num_hidden_layers
    num_layers = sum(kind not in WITHOUT_ATTENTION for kind in kinds)
    window = getattr(config, "sliding_window", None)
    return ModelSize(
        num_parameters=round(sum(body.values())) + output.numel(),
        head_parameters=output.numel(),
        num_layers=num_layers,
        attention_width=_num_heads(config) * _head_size(config),
        frozen_parameters=round(body[False]) + frozen_head,
        frozen_head=frozen_head,
        windows=(window,) * kinds.count("sliding_attention") if window else (),
        has_states=bool(_mixers_of(model)),
    )


def _active(model: PreTrainedModel) -> Iterator[tuple[Tensor, float]]:
    """Each parameter and the share of it that one token's products use: that of chosen experts."""
    chosen = getattr(model.config, "num_experts_per_tok", None) or 1
    named = dict(model.named_parameters()) | dict(packed_weights(model))
    of_experts = {name: each for name, each in named.items() if ".experts." in name}
    number = max((len(each) for each in of_experts.values() if each.ndim == 3), default=0)
    for name, parameter in named.items():
        if ".original_module." in name:  # a copy of it trains in its place
            continue
        is_shared_out = number and name in of_experts and (parameter.ndim == 3 or ".lora_" in name)
        yield parameter, min(1.0, chosen / number) if is_shared_out else 1.0


def training_flops(size: ModelSize, packed: PackedMinibatch) -> float:
    """FLOPs to train a minibatch once; 0 for a filler.

    Counted as in PaLM (Chowdhery et al. 2022, appendix B): 6 a parameter and token, of which 2
    forward and 4 backward, and 12 a pair of tokens, layer and element of attention. Of a frozen
    parameter 4: no gradient of itself, only that of its input. Repeated work,
    by activation checkpointing or by the chunks of the head, is not counted. A prompt that several
    samples share in the row is counted once.
    """
    if not packed.num_rows:
        return 0.0
    seen = packed.position_ids + 1  # [T] tokens that each attends to, itself included
    pairs = (size.num_layers - len(size.windows)) * int(seen.sum())
    pairs += sum(int(seen.clamp(max=window).sum()) for window in size.windows)
    read, scored = seen.numel(), packed.target_ids.numel()
    body, head = size.num_parameters - size.head_parameters, size.head_parameters
    frozen = (size.frozen_parameters - size.frozen_head) * read + size.frozen_head * scored
    products = 6.0 * (body * read + head * scored) - 2.0 * frozen
    return products + 12.0 * size.attention_width * pairs


def _num_heads(config: PreTrainedConfig) -> int:
    """0 of a model without attention."""
    return getattr(config, "num_attention_heads", None) or 0


def _head_size(config: PreTrainedConfig) -> int:
    # Not by `getattr`, which some configs refuse where layers differ: this is most layers' size.
    size = vars(config).get("head_dim") or config.hidden_size // max(_num_heads(config), 1)
    return int(size)


def _intermediate(config: PreTrainedConfig, routing: Routing | None) -> int:
    """Numbers between the projections of a token's MLP, or of its chosen experts together."""
    dense: int = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if routing is None:
        return dense
    of_experts: int = routing.top_k * (getattr(config, "moe_intermediate_size", None) or dense)
    return of_experts + (getattr(config, "shared_expert_intermediate_size", None) or 0)


def model_shape(policy: PolicyModel) -> ModelShape:
    """The inputs of the memory bill for a policy, whose parameters may be meta tensors."""
    config = policy.model.config
    num_heads, head_size = _num_heads(config), _head_size(config)
    layers = [_count(layer, adapted=policy.adapter is not None) for layer in policy.layers]
    total, trained = _count(policy, adapted=policy.adapter is not None)
    in_layers = [sum(counts) for counts in zip(*layers, strict=True)]
    names = [name for name, _ in policy.layers[0].named_modules()]
    return ModelShape(
        num_parameters=total,
        layer_parameters=max(own for own, _ in layers),
        root_parameters=total - in_layers[0],
        num_layers=len(layers),
        hidden=config.hidden_size,
        intermediate=_intermediate(config, policy.routing),
        query_width=num_heads * head_size,
        key_width=(getattr(config, "num_key_value_heads", None) or num_heads) * head_size,
        num_heads=num_heads,
        vocab_size=config.vocab_size,
        norms_heads=any(name.endswith("q_norm") for name in names),
        trained=_trained(policy, most=max(n for _, n in layers), root=trained - in_layers[1]),
    )


def _count(module: nn.Module, *, adapted: bool) -> tuple[int, int]:
    """(parameters of the model's own, those that train beside them)."""
    counts = {True: 0, False: 0}
    for parameter in (*module.parameters(), *dict(packed_weights(module)).values()):
        counts[adapted and parameter.requires_grad] += parameter.numel()
    return counts[False], counts[True]


def _trained(policy: PolicyModel, *, most: int, root: int) -> TrainedShare | None:
    """What trains, `most` parameters of one layer and those of the `root`; None: all does."""
    if policy.adapter is None:
        return None
    frozen = [each for each in policy.model.named_parameters() if not each[1].requires_grad]
    packed = [each for _, each in packed_weights(policy.model)]
    in_packed = sum(each.numel() for each in packed)
    touched = (p.numel() for n, p in frozen if ".base_layer." in n or ".original_module." in n)
    ranks = (
        sum(p.shape[0] for n, p in layer.named_parameters() if ".lora_A." in n)
        for layer in policy.layers
    )
    return TrainedShare(
        num_parameters=sum(each.numel() for _, each in trained_parameters(policy)),
        layer_parameters=most,
        token_values=max(ranks),
        root_parameters=root,
        touched_parameters=sum(touched) + in_packed,
        frozen_bytes=frozen[0][1].element_size(),
        trains_head=policy.head.weight.requires_grad,
        packed_parameters=in_packed,
        packs=next((layer.kind for _, layer in packed_layers(policy.model)), "none"),
        unpacked_values=max((each.numel() for each in packed), default=0),
    )
