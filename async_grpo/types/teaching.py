"""What a teacher is asked beyond the log-probabilities of tokens, and where its answer lies.

Legend: L output tokens of a row, K tokens of the vocabulary, V all of them, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from async_grpo.types.message import Message

PayloadKind = Literal["topk", "hidden", "logits"]


@dataclass(frozen=True, slots=True)
class Payload(Message):
    """What a teacher's distribution over each token travels as.

    `topk`: the K likeliest ids [L, K], their log-probabilities and the log of the rest's mass [L];
    `hidden`: the last hidden states [L, d]; `logits`: all logits [L, V].
    """

    kind: PayloadKind
    top_k: int  # K; 0 unless the kind is topk
    temperature: float  # of the distribution, for topk

    @property
    def columns(self) -> dict[str, int]:
        """{name: columns of each token}; 0 says one or more, as many as the teacher has."""
        if self.kind == "topk":
            return {"ids": self.top_k, "logprobs": self.top_k, "tail": 0}
        return {self.kind: 0}

    def bytes_per_token(self, *, hidden: int, logits: int) -> int:
        """What travels of one token, of a teacher whose states and logits have so many bytes.

        >>> Payload("topk", 64, 1.0).bytes_per_token(hidden=1152, logits=98_304)
        516
        """
        of_top_k = 8 * self.top_k + 4  # ids, log-probabilities, tail
        return {"topk": of_top_k, "hidden": hidden, "logits": logits}[self.kind]


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Message):
    """Where the payload of one row lies: in an object store, until the last ticket is dropped.

    The controller owns it, so that it survives the teacher's process, though not its node.
    """

    reference: tuple[Any]  # Ray resolves a reference on its way, unless something holds it
    teacher: str  # its role's name
    num_bytes: int
