"""Every option of `async-grpo evaluate`, `generate` and `serve`, which work without a run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from async_grpo.config.data_files import DataSource, as_text, parse_columns
from async_grpo.config.evaluation_sets import EvaluationSet, evaluation_set
from async_grpo.config.option import (
    AT_LEAST_1,
    LOG_LEVELS,
    POSITIVE,
    Options,
    flag,
    names_in,
    option,
    required,
)
from async_grpo.config.worker_config import WorkerConfig

# Options that mean something else for a worker, whose model is already a local folder.
NOT_OF_WORKER = {"model_revision", "temperature", "logging_level"}
# Those of `evaluate` that have a meaning with --loss.
OF_LOSS = {
    "loss", "block_size", "limit", "output", "dtype", "model_revision", "data_split", "data_config",
    "column_mapping", "columns", "logging_level",
}  # fmt: skip
EVALUATED_SET = "data"  # internal name of the one set, which is never shown
TOKEN_VARIABLE = "ASYNC_GRPO_TOKEN"  # of `serve`


def of_worker(name: str) -> Any:
    """A dataclass field for an option of `async-grpo worker`, with its default and bounds."""
    known = {each.name: each for each in fields(WorkerConfig)}[name]
    return field(default=known.default, metadata={**known.metadata, "group": ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(Options):
    """The worker options with which these commands make an engine."""

    model_revision: str = of_worker("model_revision")
    """branch, tag or commit of a model on a hub; empty: its main branch"""
    dtype: str = of_worker("dtype")
    """weights of the model"""
    tensor_parallel_size: int = of_worker("tensor_parallel_size")
    """devices that the model is sharded over"""
    max_num_seqs: int = of_worker("max_num_seqs")
    """sequences decoded together; 0: 64, on devices vLLM's own"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionOptions(EngineOptions):
    """`EngineOptions` and the options of reading questions and grading outputs."""

    data_split: str = option("train")
    """split of a datasets.load_dataset source"""
    data_config: str = option("")
    """configuration of a datasets.load_dataset source that has several, such as main"""
    column_mapping: str = option("")
    """our=yours pairs for other column names, such as input=question,answer=solution"""
    columns: str = option("")
    """column=type pairs for values to convert, such as level=int,share=float; or bool, str. In CSV
    all else is text"""
    unconfined_rewards: bool = of_worker("unconfined_rewards")
    """permit that rewards grade where they cannot be confined: as `async-grpo worker` has it"""
    unconfined_code: bool = of_worker("unconfined_code")
    """the same of programs that the model has written"""
    reward_registry: str = of_worker("reward_registry")
    """module or file that holds REWARD_ADAPTERS"""
    verifier_timeout_s: float = of_worker("verifier_timeout_s")
    """seconds one verification may take"""


def worker_options(config: Options) -> dict[str, Any]:
    """{option: value} that a command passes on to its workers."""
    own = {each.name for each in fields(WorkerConfig)} - NOT_OF_WORKER
    return {name: value for name, value in config.options().items() if name in own}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig(QuestionOptions):
    """Options of `async-grpo evaluate`."""

    samples: int = option(4, must=AT_LEAST_1, group="Usual options")
    """outputs sampled for each question: n of pass@k"""
    k: str = option("")
    """k of every pass@k that is told, with + between them; empty: 1 and --samples"""
    temperature: float = option(1.0)
    """sampling temperature; 0: the likeliest token each time"""
    top_p: float = option(1.0)
    """least probability that the tokens to sample from have together; 1: all tokens"""
    max_generation_tokens: int = option(512, must=POSITIVE)
    """longest output in tokens"""
    reward_fns: str = option("math_verify")
    """comma-separated reward adapters, the best verdict counts: as `async-grpo worker` has them"""
    environment: str = option("single_turn")
    """how questions are played: as `async-grpo train` takes it"""
    limit: int = option(0, none=0)
    """questions to take, from the first on; 0: all"""
    seed: int = option(0)
    """of the samples and of the intervals: the same seed gives the same numbers"""
    output: str = option("", none="")
    """JSON file of all that is measured; empty: none"""
    loss: bool = option(False)
    """sample nothing: tell the mean loss of a token of DATA, which are texts, or pairs of a prompt
    and its completion, as --algorithm sft trains them"""
    block_size: int = option(0)
    """with --loss: cut texts into blocks of so many tokens, as `async-grpo train` does; 0: each
    line is a sequence of its own"""

    renderer: str = option("auto", group="Data and model")
    """how environments write messages as tokens: as `async-grpo train` takes it"""
    num_workers: int = of_worker("num_workers")
    """engines; each takes --tensor-parallel-size devices"""
    max_model_len: int = of_worker("max_model_len")
    """longest prompt + output in tokens; 0: the model's own limit"""
    stall_timeout_s: float = option(900.0)
    """seconds in which nothing moves, after which a request is tried again, or all is given up"""
    logging_level: str = option("WARNING", choices=LOG_LEVELS)
    """log detail"""

    def check(self) -> None:
        """See `Options`."""
        if not re.fullmatch(r"(\d+(\+\d+)*)?", self.k):
            raise self.refusal("k", "must be numbers with + between them", "1+4 is usual")
        self.set_of("data")
        if self.block_size and not self.loss:
            raise self.refusal("block_size", "goes with --loss", "add it, or leave this out")
        for each in fields(self) if self.loss else ():
            if each.name not in OF_LOSS and getattr(self, each.name) != each.default:
                rule = "means nothing with --loss, which samples and grades nothing"
                raise self.refusal(each.name, rule, "leave it out")

    def set_of(self, data: str) -> EvaluationSet:
        """The evaluation set of the questions in `data`."""
        parse_columns(self.columns)  # refuses them under the name of this option
        table = {
            "name": EVALUATED_SET, "path": data, "samples": self.samples, "k": self.k,
            "temperature": self.temperature, "top_p": self.top_p,
            "max_tokens": self.max_generation_tokens, "environment": self.environment,
            "limit": self.limit, "seed": self.seed, "split": self.data_split,
            "config": self.data_config, "columns": self.columns,
        }  # fmt: skip
        given = {key: value for key, value in table.items() if value != ""}
        flags = {"max_tokens": "max_generation_tokens"}
        return evaluation_set(
            as_text(given, option_name="eval", name="name"),
            named=lambda key: flag(flags.get(key, key)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig(QuestionOptions):
    """Options of `async-grpo generate`, which writes a teacher's outputs as training pairs."""

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

    token_ids: bool = option(True, group="Data and model")
    """write the outputs' token ids too, which training takes as they are; without them it tokenises
    the text: for a student of another tokenizer"""
    logging_level: str = option("INFO", choices=LOG_LEVELS)
    """log detail"""

    def check(self) -> None:
        """See `Options`."""
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
        """Where the questions are read from."""
        return DataSource(
            self.data_path, self.data_split, self.data_config, parse_columns(self.columns)
        )

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The adapters that grade every output."""
        return names_in(self.reward_fns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineOptions):
    """Options of `async-grpo serve`, a gateway to one model."""

    host: str = option("127.0.0.1", group="Usual options")
    """address that it listens at; 0.0.0.0: every one of this machine, for whoever has the token"""
    port: int = option(8000)
    """port that it listens at; 0: any that is free"""
    served_model_name: str = option("", none="")
    """how clients call the model; empty: as it is named here"""
    renderer: str = option("auto")
    """how messages are written as tokens: auto; template, by the model's chat template; or a family
    of models of the package renderers"""
    max_model_len: int = of_worker("max_model_len")
    """longest prompt + output in tokens; 0: the model's own limit"""
    max_requests: int = option(256, must=AT_LEAST_1)
    """requests taken at a time; more are refused with 429"""
    max_sessions: int = option(256, must=AT_LEAST_1)
    """paths /s/NAME kept at a time; more are refused with 429"""
    kv_cache_gib: float = of_worker("kv_cache_gib")
    """KV cache in GiB; 0: 0.25 on CPU, vLLM's choice on GPU"""
    logging_level: str = option("INFO", choices=LOG_LEVELS)
    """log detail"""

    def check(self) -> None:
        """See `Options`."""
        if self.port > 65535:
            raise self.refusal("port", "must be at most 65535", "8000 is usual")
