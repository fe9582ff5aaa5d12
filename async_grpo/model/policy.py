"""The policy: one forward from a packed minibatch to log-probabilities.

The same module serves trainer, reference and evaluation, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from async_grpo.model.attention import PACKED
from async_grpo.model.lm_head import Head
from async_grpo.model.logprobs import HeadTerm, TokenLogprobs, token_logprobs
from async_grpo.model.rescaling import rescaling_of
from async_grpo.types import PackedMinibatch


class PolicyModel(nn.Module):
    """A causal language model whose head runs in chunks inside the root's forward.

    Inside, because FSDP2 gathers the root's parameters (embedding and head) only there.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._rescaling = rescaling_of(model.config)
        self.compile_logprobs = False  # what is done with each chunk's logits

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
        states: Tensor = self.model.base_model(
            input_ids=packed.input_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,  # with a cache, transformers lets packed sequences see each other
            cu_seq_lens_q=packed.cu_seqlens,
            cu_seq_lens_k=packed.cu_seqlens,
            max_length_q=packed.max_seqlen,
            max_length_k=packed.max_seqlen,
            repeat_index=packed.repeat_index,
            first_index=packed.first_index,
        ).last_hidden_state[0]
        return states.index_select(0, packed.logit_positions)

    @property
    def head(self) -> Head:
        """What makes logits of the last hidden states; under FSDP2 whole within a forward only."""
        linear = self.model.get_output_embeddings()
        return Head(linear.weight, getattr(linear, "bias", None), self._rescaling)

    @property
    def shares_prompts(self) -> bool:
        """Whether `forward` understands minibatches in which samples share a prompt."""
        return bool(self.model.config._attn_implementation == PACKED)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order: the units of sharding, checkpointing and compilation."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if _class_name(module) in names]


def hf_named_parameters(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) as a Hugging Face checkpoint names them; a tied head is not repeated."""
    yield from policy.model.named_parameters()


def _class_name(module: nn.Module) -> str:
    """The module's class as transformers calls it; FSDP2 and compilation put FSDP in front."""
    return type(module).__name__.removeprefix("FSDP")
