import ast
import re
from pathlib import Path

import pytest

import async_grpo
from async_grpo.config.option import option_fields
from async_grpo.config.train_config import TrainConfig
from async_grpo.util import deadlines

PACKAGE = Path(async_grpo.__file__).parent
DEFAULTS = {name: each.default for name, each in option_fields(TrainConfig).items()}
WAIT = re.compile(r"(TIMEOUT|SLACK|SILENCE|GRACE|FROZEN|ENDING|LEASE|DEADLINE)[A-Z_]*_S$")


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("PING_S", "LEASE_S"),  # several pings, so that one that is lost kills nobody
        ("LEASE_S", "ANSWER_S"),  # a frozen worker is fenced before whoever asks it gives up
        ("BUCKET_STAGED_S", "WEIGHTS_APPLIED_S"),
        ("ENGINE_SLEEPS_S", "ENGINE_ASLEEP_S"),  # a worker names its engine before it is fenced
        ("ENGINE_SLEEPS_S", "WEIGHTS_APPLIED_S"),
        ("ENGINE_ASLEEP_S", "DEVICES_TAKEN_S"),
        ("ENGINE_ASLEEP_S", "BEGIN_RUN_S"),
        ("BUCKET_HERE_S", "BUCKET_FETCH_S"),
        ("BUCKET_STORED_S", "WEIGHTS_COLLECTED_S"),
        ("CANARY_S", "WEIGHTS_APPLIED_S"),
        ("STATUS_S", "ANSWER_S"),
        ("ANSWER_S", "CONTROLLER_FOUND_S"),  # of a frozen one, after which another is made
        ("CONTROLLER_SILENCE_S", "CONTROLLER_FOUND_S"),
        ("CONTROLLER_SILENCE_S", "CONTROLLER_IDLE_S"),  # who finds it has time to use it
        ("UNWITNESSED_S", "OTHER_RUN_ENDED_S"),  # whoever comes next finds a dead run ended
        ("UNWITNESSED_S", "TRAINER_SILENCE_S"),
        ("OTHER_RUN_ENDED_S", "BEGIN_RUN_S"),
        ("OTHER_REWARDS_GONE_S", "ANSWER_S"),
        ("RELEASED_S", "WORK_ENDED_S"),
        ("LATE_LOADS_S", "WEIGHTS_APPLIED_S"),
        ("WEIGHTS_APPLIED_S", "FIRST_LOAD_S"),
        ("GRADERS_LOADED_S", "SHARE_TAKEN_S"),
        ("TRACKERS_ENDED_S", "RANK_GRACE_S"),
        ("RUN_ENDED_S", "BEGIN_RUN_S"),  # whoever comes next waits longer than the one who goes
        ("RANKS_TOLD_S", "GROUP_SLACK_S"),
        ("HUB_ANSWER_S", "HUB_PUSH_S"),
        ("HUB_PUSH_S", "HUB_PUSHED_S"),  # why the last one failed is told
        ("RECORDER_FLUSH_S", "STATUS_S"),  # a step that waits for its dump is no silence
        ("RECORDER_FLUSH_S", "RECORDER_WRITE_S"),
        ("WEIGHTS_APPLIED_S", "CHECKPOINT_S"),
        ("RANKS_START_S", "CHECKPOINT_S"),
        ("GRADER_ENDED_S", "GRADER_SILENCE_S"),
        ("GRADER_SILENCE_S", "GRADERS_LOADED_S"),
        ("GRADER_ENDED_S", "JAIL_TRIED_S"),
        ("JAIL_TRIED_S", "GRADERS_LOADED_S"),  # a server tries one while it starts
        ("EXPRESS_FORMED_S", "EXPRESS_CHUNK_S"),
        ("EXPRESS_CHUNK_S", "GROUP_SLACK_S"),  # ranks wait for one that waits for a teacher
        ("OTHERS_ENDED_S", "RANKS_LEAVING_S"),
        ("RANKS_LEAVING_S", "RANKS_ENDED_S"),
        ("RANK_BREAK_OFF_S", "RANK_GRACE_S"),
        ("RANK_GRACE_S", "RANKS_ENDED_S"),
        ("RANKS_ENDED_S", "TRAINER_ENDED_S"),
        ("TRAINER_ENDED_S", "CHECKPOINT_S"),
        ("TRAINER_ENDED_S", "JOB_ENDED_S"),  # a job saves what it has
    ],
)
def test_a_wait_is_shorter_than_those_that_contain_it(inner, outer):
    assert getattr(deadlines, inner) < getattr(deadlines, outer)


def test_progress_is_heard_of_before_a_stall():
    assert deadlines.LEAST_STALL_S >= 2 * deadlines.PING_S


def test_weights_are_applied_before_the_default_stall():
    applied = deadlines.WEIGHTS_APPLIED_S + deadlines.PUBLISH_SLACK_S
    assert applied < DEFAULTS["stall_timeout_s"]


def test_a_collective_outlasts_what_rank_0_may_wait_for():
    assert deadlines.GROUP_SLACK_S > deadlines.WEIGHTS_APPLIED_S + deadlines.PUBLISH_SLACK_S


def waits(path):
    """Constants that are waits, and numbers given as a timeout, as `line: source`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            names = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(name, ast.Name) and WAIT.search(name.id) for name in names):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif (
            isinstance(node, ast.keyword)
            and node.arg in ("timeout", "timeout_s")
            and isinstance(node.value, ast.Constant)
            and node.value.value
        ):
            yield f"{node.value.lineno}: {ast.unparse(node)}"


def test_waits_stand_in_the_table_alone():
    found = {
        f"{path.relative_to(PACKAGE)}:{wait}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "deadlines.py"
        for wait in waits(path)
    }
    assert not found


def test_every_wait_of_the_table_is_waited():
    names = {name for name in vars(deadlines) if name.endswith("_S")}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "deadlines.py":
            names -= set(re.findall(r"\w+", path.read_text()))
    assert not names
