"""What all systems of a comparison do, and the questions in the order in which they are asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from async_grpo.data.order import QuestionStream
from benchmarks.stack import MODEL
from benchmarks.two_cores import even_lengths

KL_COEFFICIENT = 0.04
UNSEEN = 1e-12  # learning rate: every update is computed, and no float32 weight moves
# Layers, hidden size, size of the MLP, heads, heads of keys; 64 a head.
SIZES = {"5M": (4, 320, 960, 5, 1), "20M": (6, 512, 1536, 8, 4), "50M": (8, 704, 2112, 11, 11)}
FORM = f"[{'|'.join(SIZES)}] natural|fixed [with KL] [of N]"


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


@dataclass(frozen=True, slots=True)
class Setting:
    """What the name of a setting says: `[SIZE] natural|fixed [with KL] [of N]`.

    Without a size it is the quick start's model, which learns. Of the sizes weights are random and
    stay what they are, so that every system does the same work in every step; their natural lengths
    are geometric, 48 tokens of at most 64 in the mean.

    >>> Setting.read("20M natural with KL of 4")
    Setting(size='20M', even=False, kl=True, samples_per_question=4)
    """

    size: str = ""
    even: bool = False
    kl: bool = False
    samples_per_question: int = 8

    @classmethod
    def read(cls, name: str) -> Setting:
        """Raises ValueError for what is no setting."""
        size, _, lengths = name.rpartition("natural" if "natural" in name else "fixed")
        lengths, _, number = lengths.partition(" of ")
        setting = cls(
            size.strip(),
            "natural" not in name,
            lengths == " with KL",
            int(number) if number.isdigit() else 8,
        )
        if setting.name != name or setting.size not in ("", *SIZES):
            raise ValueError(f"a setting must be {FORM}, got {name!r}")
        return setting

    @property
    def name(self) -> str:
        parts = (self.size, "fixed" if self.even else "natural", "with KL" if self.kl else "")
        number = f"of {self.samples_per_question}" if self.samples_per_question != 8 else ""
        return " ".join(filter(None, (*parts, number)))

    def task(self, folder: Path, *, questions: Path, num_steps: int) -> Task:
        """256 samples a step, whatever their number for a question."""
        model = random_model(folder / self.size, self.size) if self.size else MODEL
        if self.even:
            model = even_lengths(folder / f"even-{self.size}", model)
        return Task(
            str(model),
            str(questions),
            num_steps=num_steps,
            kl_coefficient=KL_COEFFICIENT if self.kl else 0.0,
            learning_rate=UNSEEN if self.size else 3e-4,
            questions_per_step=256 // self.samples_per_question,
            samples_per_question=self.samples_per_question,
        )


def random_model(folder: Path, size: str) -> Path:
    """The quick start's kind of model and tokenizer, larger, its weights drawn from seed 0.

    It never samples `<pad>`, which is the end of `even_lengths`: every state has the same large
    first component, on which the head gives that token alone a score.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers, hidden, intermediate, heads, key_heads = SIZES[size]
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    shape: Mapping[str, int] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 64,
        "max_window_layers": layers,
    }
    config = Qwen3Config.from_pretrained(
        MODEL, layer_types=["full_attention"] * layers, tie_word_embeddings=False, **shape
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[config.pad_token_id, 0] = -10.0
    model.save_pretrained(folder)
    return folder
