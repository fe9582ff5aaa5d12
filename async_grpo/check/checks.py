"""The checks: each reads a run's options and the facts, starts nothing, and says what it finds.

A rule that a run enforces when it starts is not written again here: it is called.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from async_grpo.algorithms.find import find_algorithm
from async_grpo.check import sizes, worker_tables
from async_grpo.check.data_read import DataRead
from async_grpo.check.facts import Facts
from async_grpo.check.finding import EVERYTHING, Cost, Finding, Setup, refused, stated, tried
from async_grpo.check.worker_tables import TRIAL_S, as_registered
from async_grpo.config.roles import ENGINES
from async_grpo.config.teaching import check_vocabulary
from async_grpo.environments.chat.find import AUTO, find_renderer
from async_grpo.environments.find import check_environments
from async_grpo.model.foreign_folders import family_of
from async_grpo.model.hub import check_push
from async_grpo.model.model_folder import ModelFacts
from async_grpo.run.data import check_routes, few_lines
from async_grpo.run.output_folder import check_output, check_overwrite
from async_grpo.run.recruitment import Demand, brought_by, check_roles, check_worker
from async_grpo.run.reward_trial import refuse_or_describe
from async_grpo.telemetry.schema import METRIC_BY_NAME, axis_label
from async_grpo.types.worker_info import confinement_in_words
from async_grpo.util.add_ons import add_on
from async_grpo.util.errors import AsyncGrpoError
from async_grpo.weight_sync.routes import as_stated, publishes_adapter, serving_adapters

MANY_UNKNOWN = 0.1  # of the tokens of the first prompts
OWN_PROGRAMS = ("python", "async-grpo")  # which `launch` starts as it was started itself

Check = Callable[[Setup, Facts], Iterable[Finding]]


def check_folders(setup: Setup, _: Facts) -> Iterator[Finding]:
    """The output folder can be written, trackers are known, exports can be sent."""
    recording = setup.train.recording
    written = f"{recording.output_dir} can be written"
    yield from _of("output", lambda: check_output(recording), written)
    yield from _of("output", lambda: check_overwrite(recording, is_typed=setup.types_overwrite))
    if names := recording.trackers:
        yield from _of(
            "trackers", lambda: add_on("trackers").check_trackers(names), ", ".join(names)
        )
    else:
        yield Finding("ok", "trackers", "none")
    if name := recording.push_to_hub:
        shown = "to everybody" if recording.hub_public else "to its owners alone"
        yield from _of(
            "hub", lambda: check_push(name), f"exports are sent to {name}, shown {shown}"
        )


def check_code(setup: Setup, _: Facts) -> Iterator[Finding]:
    """The algorithm, the environments, and a worker for each role of a run on its own cluster."""
    config = setup.train
    names = ", ".join(sorted(config.environments))
    yield from _of("algorithm", lambda: find_algorithm(config), config.objective.algorithm)
    yield from _of("environment", lambda: check_environments(config.environments), names)
    if setup.starts_head:
        roles = brought_by(setup.workers)
        yield from _of(
            "roles", lambda: check_roles(config, roles, where=setup.file), ", ".join(sorted(roles))
        )


def check_prepare(setup: Setup, _: Facts) -> Iterator[Finding]:
    """Programs of `prepare` and its first script exist; that script may make later ones."""
    for number, (program, *words) in enumerate(setup.prepare):
        is_made = number and os.sep in program
        if program not in OWN_PROGRAMS and not is_made and not shutil.which(program):
            yield _cannot("program", program)
        is_script = number == 0 and program.startswith("python") and words[0:1]
        if is_script and words[0].endswith(".py") and not Path(words[0]).is_file():
            yield _cannot("script", words[0])


def _cannot(kind: str, name: str) -> Finding:
    text = f"[launch] prepare must name a {kind} that is there, {name} is not: correct it"
    return Finding("error", "prepare", text)


def check_model(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """The folder, its tokenizer, what can be trained, and how large it is."""
    name = setup.train.places.model_name_or_path
    if isinstance(facts.model, AsyncGrpoError):
        yield from refused("model", facts.model)
    elif facts.model is None:
        made = setup.is_prepared(name)
        why = "is made by [launch] prepare" if made else "is fetched from the hub when a run starts"
        yield Finding("waits", "model", f"{name} {why}: it is checked when it is here")
    else:
        yield Finding("ok", "model", sizes.sizes_in_words(facts.model, facts.size))
        if family := family_of(Path(facts.model.path)):
            yield Finding("ok", "family", family.in_words)
        vocab_size = facts.model.vocab_size
        yield from _of("teachers", lambda: check_vocabulary(setup.train.teaching, vocab_size))


def check_adapter(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """An adapter's folder and layers, and how it gets to workers."""
    config, adapter = setup.train, facts.adapter
    if isinstance(adapter, AsyncGrpoError):
        yield from refused("adapter", adapter)
        return
    if not adapter:
        return
    if adapter.get("lora_dropout"):
        text = f"lora_dropout {adapter['lora_dropout']} of {config.adapter.adapter_path} is "
        text += "switched off: with it a token's ratio would not be 1 on policy"
        yield Finding("warning", "adapter", text)
    yield from stated("adapter", facts.adapter_fits)
    on_cpu = not facts.num_devices
    tables = serving_adapters(config, adapter, setup.workers, on_cpu=on_cpu)
    infos = [as_stated(each, on_cpu=on_cpu) for each in tables]
    found = tried(lambda: publishes_adapter(config, adapter, infos)) if infos else (True, "")
    if isinstance(found, AsyncGrpoError):
        yield from refused("adapter", found)
    elif infos:
        how = "the adapter alone" if found[0] else "weights with the adapter merged into them"
        yield Finding("ok", "adapter", f"workers are sent {how}: {found[1]}")


def check_contents(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """The weights beside the model's config, and how its messages are written."""
    yield from stated("model", facts.weights, level="warning")
    if (named := setup.train.data.renderer) != AUTO and isinstance(facts.model, ModelFacts):
        yield from _of("renderer", partial(find_renderer, facts.model.path, named), named)


def check_data(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """Every line of every source can be read; report the lengths of its prompts."""
    if isinstance(facts.data, AsyncGrpoError):
        yield from refused("data", facts.data)
        return
    for read in facts.data:
        yield from _check_read(setup, read)
    if facts.prompt:
        yield Finding("ok", "prompt", f"the model reads {facts.prompt!r}")
    if facts.begins_twice:
        yield Finding(
            "warning",
            "prompt",
            f"the prompt {facts.prompt[:40]!r} begins with the tokenizer's first token twice: "
            "leave it out of the data's text, the tokenizer adds it",
        )


def _check_read(setup: Setup, read: DataRead) -> Iterator[Finding]:
    what = f"{read.source.path} ({read.purpose})"
    if read.waits:
        yield Finding("waits", "data", f"{read.waits}: it is checked when it is here")
        return
    if read.problem is not None:
        yield from refused("data", read.problem)
        return
    rest = "" if read.is_whole else " so far; the run checks the rest"
    kind = "blocks" if setup.train.data.block_size else "lines"
    yield Finding(
        "ok", "data", f"{what}: {read.num_lines} {kind}{rest}, {sizes.lengths_in_words(read)}"
    )
    is_all = read.purpose == "train" and not setup.train.data.data and read.is_whole
    if is_all and (few := few_lines(setup.train, read.num_lines)):
        yield Finding("warning", "data", few)


def check_lines(_: Setup, facts: Facts) -> Iterator[Finding]:
    """Warn of copied lines, odd columns and roles, and of held-out questions in training data."""
    reads = facts.data if isinstance(facts.data, tuple) else ()
    for read in reads:
        path = read.source.path
        for sentence in read.notes.in_words(path):
            yield Finding("warning", "data", sentence)
        if read.unknown >= MANY_UNKNOWN:
            text = f"{read.unknown:.0%} of the tokens of the first prompts of {path} are unknown"
            yield Finding(
                "warning", "data", f"{text} to the model's tokenizer: take text that it knows"
            )
        for other in reads if read.purpose == "held out" else ():
            shared = len(read.notes.keys & other.notes.keys)
            if shared and other.purpose != "held out":
                text = f"{shared} of the {len(read.notes.keys)} questions of {path} (held out) are "
                text += f"in {other.source.path}, which is trained: hold out others"
                yield Finding("warning", "data", text)


def check_teachers(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """A teacher for every type of line, and lines for every teacher."""
    if not setup.train.teacher_names or not isinstance(facts.data, tuple) or not facts.data:
        return
    reads = [read for read in facts.data if read.purpose != "held out"]
    if any(read.problem or read.waits or not read.is_whole for read in reads):
        return
    of_data = {kind for read in reads if read.purpose == "train" for kind in read.firsts}
    of_pairs = {kind for read in reads if read.purpose == "given" for kind in read.firsts}
    names = ", ".join(setup.train.teacher_names)
    yield from _of("teachers", lambda: check_routes(setup.train, of_data, of_pairs), names)


def check_workers(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """The models of the workers can be read, and could serve this run."""
    yield from _of("rewards", lambda: worker_tables.check_same_rewards(setup.workers))
    for config, model in zip(setup.workers, facts.worker_models, strict=True):
        who = f"the {config.role} worker"
        rule = partial(worker_tables.check_engine, config, model, facts.engine_options)
        yield from _of("worker", rule)
        if isinstance(model, AsyncGrpoError):
            if model is not facts.model:  # `check_model` reports that one
                yield from refused("worker", model)
        elif isinstance(model, ModelFacts) and isinstance(facts.model, ModelFacts):
            worker, demand = as_registered(config, model), _demand(setup, facts)
            text = f"{who} serves {config.model_path} for {worker.max_model_len} tokens"
            if config.mode not in ENGINES:
                limit = "by --max-tokens-per-gpu and the model's positions"
                text = (
                    f"{who} scores {worker.max_model_len} tokens with {config.model_path}, {limit}"
                )
            yield from _of("worker", partial(check_worker, worker, demand), text)
        elif model is None and config.model_path and setup.is_prepared(config.model_path):
            yield Finding("waits", "worker", f"{config.model_path} is made by [launch] prepare")


def _demand(setup: Setup, facts: Facts) -> Demand:
    assert isinstance(facts.model, ModelFacts)
    reads = facts.data if isinstance(facts.data, tuple) else ()
    prompts, pairs = (
        max((int(each.lengths.max(initial=0)) for each in reads if is_of(each)), default=0)
        for is_of in (lambda each: each.purpose != "given", lambda each: each.purpose == "given")
    )
    devices = ("another",) if facts.num_devices else ()  # who gets which, the placement says
    return Demand(setup.train, facts.model, prompts, longest_pair=pairs, devices=devices)


def check_rewards(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """How rewards are confined, and how each grades the expected answer of the first line."""
    if isinstance(facts.rewards, AsyncGrpoError):
        yield from refused("reward", facts.rewards)
        return
    if how := facts.rewards.confinement:
        words = confinement_in_words(how)
        yield Finding("warning" if any(how.values()) else "ok", "confinement", words)
    for sentence in facts.rewards.unseen:
        text = f"{sentence}: it is not imported here, unless you read it and give --trust"
        yield Finding("warning", "reward", text)
    for trial in facts.rewards.trials:
        verdict, question = trial.verdict, trial.question
        if verdict is None:
            text = f"{trial.worker.reward_fns} had not graded the first line after {TRIAL_S:g} s: "
            text += "a run refuses a reward that takes longer than --verifier-timeout-s "
            yield Finding("warning", "reward", f"{text}{trial.worker.verifier_timeout_s:g}")
        elif verdict.cause == "connection" and trial.worker.verifier_network and not setup.trusted:
            text = f"{verdict.adapter} asks over the network, which it has here with --trust alone"
            yield Finding("waits", "reward", text)
        elif verdict.status == "error":
            said = tried(partial(refuse_or_describe, verdict, question, setup.train.data))
            rest = "; a run starts all the same"
            yield from stated("reward", said, rest=rest, level="warning")
        else:
            answer = (question.answer or question.input)[:60]
            said = f"reward {verdict.reward:g}" if verdict.status == "scored" else verdict.reason
            text = f"{verdict.adapter} on {answer!r}: {said or verdict.status}"
            yield Finding("ok", "reward", text)


def check_devices(setup: Setup, facts: Facts) -> list[Finding]:
    """Each rank and worker gets a device of this machine, or a share of one, if it needs one."""
    on_cpu = not facts.num_devices
    needs = _of("devices", lambda: setup.train.check_devices(on_cpu=on_cpu))
    return needs + stated("devices", facts.placement)


def check_places(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """The cluster that the run joins has room, and the gateway's port is free."""
    joined = facts.head if isinstance(facts.head, AsyncGrpoError) else facts.cluster
    if isinstance(joined, AsyncGrpoError):
        yield from refused("cluster", joined)
    elif joined:
        yield worker_tables.room_in(joined, setup, address=str(facts.head))
    elif setup.starts_head:
        yield Finding("ok", "cluster", "a Ray cluster of the run's own, on this machine")
    yield from stated("gateway", facts.gateway, rest=" is free")


def check_start(_: Setup, facts: Facts) -> list[Finding]:
    """Whether the run begins, or goes on, in its folder."""
    return stated("start", facts.start)


def check_plot(setup: Setup, _: Facts) -> Iterator[Finding]:
    """Variables of [plot] are metrics; only near misses are named, an algorithm may add some."""
    for name in setup.plot.get("variable", ()):
        near = get_close_matches(name.partition("/")[0], METRIC_BY_NAME, n=1, cutoff=0.8)
        if axis_label(name) == name and near:
            text = f"[plot] variable {name} is no metric of every run, the nearest is {near[0]}"
            yield Finding("warning", "plot", f"{text}: correct it, or nothing will be drawn")


def check_packages(_: Setup, facts: Facts) -> Iterator[Finding]:
    """The installed packages have the versions and interfaces that we rely on."""
    for sentence in facts.unfit:
        yield Finding("error", "packages", f"{sentence}: run `make setup`, or pip install -r "
                      "requirements/cpu.txt (gpu.txt with NVIDIA devices)")  # fmt: skip
    if not facts.unfit:
        yield Finding("ok", "packages", "versions and interfaces are those that are relied on")


_FIRST, _THEN = Cost.AT_ONCE, Cost.SECONDS
CHECKS: Mapping[Check, Cost] = {  # in the order in which a run would meet what they find
    check_folders: _FIRST, check_code: _FIRST, check_prepare: _FIRST, sizes.check_options: _FIRST,
    check_start: _FIRST, check_model: EVERYTHING,
    check_adapter: EVERYTHING, check_contents: _THEN, check_data: EVERYTHING,
    check_lines: _THEN, check_teachers: _THEN, sizes.check_batch: _FIRST, check_rewards: _THEN,
    check_workers: EVERYTHING, check_devices: _FIRST, check_places: _FIRST,
    sizes.check_room: _FIRST, check_plot: _FIRST, check_packages: _FIRST,
}  # fmt: skip


def check_all(setup: Setup, facts: Facts, *, cost: Cost = EVERYTHING) -> list[Finding]:
    """All findings of the checks of this cost; a text that two checks find appears once."""
    asked = [check for check, own in CHECKS.items() if own & cost]
    found = [finding for check in asked for finding in _found(check, setup, facts)]
    return list({(each.level, each.text): each for each in reversed(found)}.values())[::-1]


def _found(check: Check, setup: Setup, facts: Facts) -> list[Finding]:
    """Run one check; an exception becomes an error finding that names it, and stops no other."""
    found = tried(lambda: list(check(setup, facts)))
    if isinstance(found, AsyncGrpoError):
        return refused(check.__name__.removeprefix("check_"), found)
    return found


def _of(subject: str, rule: Callable[[], object], text: str = "") -> list[Finding]:
    """Call a rule: the finding of what it raises, else an ok with `text`, if there is any."""
    found = tried(rule)
    return stated(subject, found if isinstance(found, AsyncGrpoError) else text)
