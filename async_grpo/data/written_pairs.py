"""Outputs of a model as lines of training pairs: which are kept, and what a line holds. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from async_grpo.types import Question, Turn, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRules:
    """What becomes of each output."""

    min_reward: float
    has_token_ids: bool
    mapping: Mapping[str, str] = field(default_factory=dict)  # our column names to the user's

    def why_rejected(self, turn: Turn, verdict: Verdict | None) -> str:
        """A short fixed phrase, or nothing for an output that is kept; None: nobody graded it."""
        if turn.finish_reason != "stop":
            return "cut at --max-generation-tokens"  # without its end, nobody would learn to end
        if not turn.text.strip():
            return "empty"
        if verdict is None:
            return ""
        if verdict.status == "error":
            return "not graded, for the reward failed"
        return "" if verdict.reward >= self.min_reward else f"reward below {self.min_reward:g}"

    def line(self, question: Question, turn: Turn, verdict: Verdict | None) -> bytes:
        """The user's line with the output as its completion, and its reward if it was graded.

        >>> import numpy as np
        >>> question = Question(np.array([5]), "2+2=", "4", {"q": "2+2=", "level": 1})
        >>> turn = Turn(np.array([6, 1]), np.zeros(2), (), "stop", "4")
        >>> PairRules(min_reward=1, has_token_ids=True).line(question, turn, None).decode()
        '{"q": "2+2=", "level": 1, "completion": "4", "completion_token_ids": [6, 1]}\\n'
        """
        text, ids = (self.mapping.get(n, n) for n in ("completion", "completion_token_ids"))
        written: dict[str, Any] = {**question.columns, text: turn.text}
        written.pop(ids, None)  # of a line that had a demonstration
        if self.has_token_ids:
            written[ids] = turn.token_ids.tolist()
        if verdict is not None:
            written["reward"] = verdict.reward
        # Columns may hold what no JSON has, as dates; a lone surrogate of a text has no UTF-8.
        content = json.dumps(written, ensure_ascii=False, default=str)
        return content.encode("utf-8", errors="backslashreplace") + b"\n"


@dataclass(slots=True)
class PairCount:
    """What has become of the outputs so far."""

    num_kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # outputs by why

    @property
    def num_outputs(self) -> int:
        return self.num_kept + self.rejected.total()

    def see(self, why_rejected: str) -> bool:
        """Count an output; whether it is kept."""
        if why_rejected:
            self.rejected[why_rejected] += 1
        else:
            self.num_kept += 1
        return not why_rejected

    def in_words(self) -> str:
        """
        >>> count = PairCount(61, Counter({"reward below 1": 2, "empty": 1}))
        >>> count.in_words()
        '61 pairs of 64 outputs; rejected: 2 reward below 1, 1 empty'
        """
        why = ", ".join(f"{number} {reason}" for reason, number in self.rejected.most_common())
        return f"{self.num_kept} pairs of {self.num_outputs} outputs; rejected: {why or 'none'}"
