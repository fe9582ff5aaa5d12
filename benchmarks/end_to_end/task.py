"""What all systems of a comparison do, and the questions in the order in which they are asked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from async_grpo.data.order import QuestionStream


@dataclass(frozen=True, slots=True)
class Task:
    """The model, the questions and the update; how a system gets there is its own."""

    model: str  # folder
    questions: str  # JSONL file, in any order: the seed says in which they are asked
    num_steps: int
    kl_coefficient: float = 0.0
    seed: int = 0
    learning_rate: float = 3e-4
    questions_per_step: int = 32
    samples_per_question: int = 8
    max_output_tokens: int = 64
    longest_sequence: int = 128  # prompt and output

    @property
    def samples_per_step(self) -> int:
        return self.questions_per_step * self.samples_per_question

    def write(self, file: Path) -> Path:
        """As a process that does the task reads it."""
        file.write_text(json.dumps(asdict(self)))
        return file

    @classmethod
    def read(cls, file: Path) -> Task:
        return cls(**json.loads(file.read_text()))

    def asked(self) -> list[dict[str, object]]:
        """The lines of the questions as the steps ask them, over as many epochs as it takes."""
        lines = [json.loads(line) for line in Path(self.questions).read_text().splitlines()]
        order = QuestionStream(len(lines), seed=self.seed)
        num_asked = self.num_steps * self.questions_per_step
        return [lines[order.index(ordinal)] for ordinal in range(num_asked)]
