"""The options of what a run trains on, and of how its questions are played."""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config.data_files import DATA_FILES, DataFile, DataSource, parse_columns
from async_grpo.config.option import Change, Options, names_in, option, require


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(Options):
    """Files of questions, and what plays them."""

    data_path: str = option("", change=Change.PLACE, group="The run and its data")
    """JSONL file, or anything datasets.load_dataset reads; several: --data"""
    data: tuple[DataFile, ...] = option((), several=DATA_FILES, change=Change.FIXED)
    """TYPE=PATH,key=value,...: a data file in the place of --data-path, whose questions are of that
    dataset_type; give it once for each type. Keys: weight of its share of every batch (1),
    environment, rewards (names with + between), teacher, eval_path, split, config, columns (types),
    and names of columns as input=question"""
    data_split: str = option("train")
    """split of a datasets.load_dataset source"""
    data_config: str = option("")
    """configuration of a datasets.load_dataset source that has several, such as main"""
    column_mapping: str = option("")
    """our=yours pairs for other column names, such as input=question,answer=solution"""
    columns: str = option("")
    """column=type pairs for values to convert, such as level=int,share=float; or bool, str. In CSV
    all else is text"""
    infinite_sampler_seed: int = option(37, must="", change=Change.FIXED)
    """seed of the endless permutation of the questions"""
    environment: str = option("single_turn", change=Change.FIXED)
    """how questions are played: single_turn, or on workers of --mode environment: your own,
    package.module:Name, path/to/file.py:Name; an agent of OpenAI's protocol, agent:COMMAND; a
    taskset of verifiers, "verifiers:PYTHON TASKSET"; or an OpenEnv server, openenv:URL"""
    judges: str = option("", change=Change.FIXED)
    """comma-separated names of the judges that environments ask: workers of --mode judge"""
    renderer: str = option("auto", change=Change.FIXED)
    """how environments write messages as tokens: auto; template, by the model's chat template; or
    a family of models of the package renderers"""

    def check(self) -> None:
        """See `Options`."""
        for kind in self.types:
            rule = "must have one file for each type"
            require(self.types.count(kind) == 1, "data", rule, kind, "give each type once")
        if bool(self.data_path) == bool(self.data):
            rule = "must be given, or --data for each of several files, and not both"
            raise self.refusal("data_path", rule, "name one file, or all with their types")

    @property
    def data_files(self) -> tuple[DataFile, ...]:
        """What is trained on: a file of each type, or one whose lines say their type, if any."""
        types = parse_columns(self.columns)
        source = DataSource(self.data_path, self.data_split, self.data_config, types)
        return self.data or (DataFile(source=source),)

    @property
    def data_paths(self) -> str:
        """Of the questions, for messages."""
        return ", ".join(file.source.path for file in self.data_files)

    @property
    def types(self) -> tuple[str, ...]:
        """Of the questions, where each has a file."""
        return tuple(file.type for file in self.data)

    def file_of(self, dataset_type: str) -> DataFile:
        """The file that holds the questions of a type."""
        return next(each for each in self.data_files if each.type in ("", dataset_type))

    def rewards_of(self, dataset_type: str) -> tuple[str, ...]:
        """The rewards that grade the questions of a type; none: all that the verifiers have."""
        return self.file_of(dataset_type).rewards

    def environment_of(self, dataset_type: str) -> str:
        """The name of the environment that plays the questions of a type."""
        return self.file_of(dataset_type).environment or self.environment

    @property
    def judge_names(self) -> tuple[str, ...]:
        """Of --judges."""
        return names_in(self.judges)

    @property
    def file_teachers(self) -> dict[str, str]:
        """{dataset_type: name of its teacher}, as data files name them."""
        return {file.type: file.teacher for file in self.data_files if file.teacher}
