"""Every option of `async-grpo generate`."""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config.option import (
    AT_LEAST_1,
    LOG_LEVELS,
    POSITIVE,
    Options,
    names_in,
    option,
    required,
)
from async_grpo.config.source import DataSource, parse_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig(Options):
    """Options of sequence-level distillation's data: a teacher's own outputs as training pairs."""

    model_path: str = required(group="Usual options")
    """Hugging Face folder of the teacher, or its name on a hub"""
    data_path: str = required()
    """questions: JSONL file, or anything datasets.load_dataset reads"""
    output: str = required()
    """JSONL file of pairs to write, for --algorithm sft and --pairs-path; replaced at the end"""
    samples_per_question: int = option(1, must=AT_LEAST_1)
    """outputs sampled for each question"""
    temperature: float = option(1.0)
    """sampling temperature; 0: the likeliest token each time"""
    max_generation_tokens: int = option(512, must=POSITIVE)
    """longest output in tokens; those that reach it are left out"""
    reward_fns: str = option("", none="")
    """comma-separated reward adapters, the best verdict counts: as `async-grpo worker` takes them;
    empty: every output is kept"""
    min_reward: float = option(1.0, must="")
    """least reward, with --reward-fns, of an output that is kept"""
    limit: int = option(0, none=0)
    """questions to take, from the first on; 0: all"""
    seed: int = option(37, must="")
    """the same seed gives the same outputs"""

    data_split: str = option("train", group="Data and model")
    """split of a datasets.load_dataset source"""
    data_config: str = option("")
    """configuration of a datasets.load_dataset source that has several, such as main"""
    column_mapping: str = option("")
    """our=yours pairs for other column names, such as input=question,answer=solution"""
    columns: str = option("")
    """column=type pairs for values to convert, such as level=int,share=float; or bool, str. In CSV
    all else is text"""
    token_ids: bool = option(True)
    """write the outputs' token ids too, which training takes as they are; without them it tokenises
    the text: for a student of another tokenizer"""
    model_revision: str = option("", none="")
    """branch, tag or commit of a model on a hub; empty: its main branch"""
    dtype: str = option("auto", choices=("auto", "float32", "bfloat16"))
    """weights of the model"""
    max_num_seqs: int = option(0)
    """sequences decoded together; 0: 64, on devices vLLM's own"""
    tensor_parallel_size: int = option(1, must=AT_LEAST_1)
    """devices that the model is sharded over"""
    unconfined_rewards: bool = option(False)
    """permit that rewards grade where they cannot be confined: as `async-grpo worker` has it"""
    unconfined_code: bool = option(False)
    """the same of programs that the model has written"""
    reward_registry: str = option("reward_registry")
    """module or file that holds REWARD_ADAPTERS"""
    verifier_timeout_s: float = option(10.0, must=POSITIVE)
    """seconds one verification may take"""
    logging_level: str = option("INFO", choices=LOG_LEVELS)
    """log detail"""

    def __post_init__(self) -> None:
        self.check_numbers()
        if self.samples_per_question > 1 and not self.temperature:
            raise self.refusal(
                "samples_per_question",
                "must be 1 at --temperature 0, where every output is the same",
                "raise the temperature, 1.0 is usual",
            )
        if self.output == self.data_path:
            raise self.refusal(
                "output", "must be another file than --data-path", "name another file"
            )

    @property
    def data(self) -> DataSource:
        """The questions."""
        return DataSource(
            self.data_path, self.data_split, self.data_config, parse_columns(self.columns)
        )

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The adapters that grade every output."""
        return names_in(self.reward_fns)
