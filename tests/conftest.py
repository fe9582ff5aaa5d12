"""Helpers that several rooms' tests import by name lie in these folders; no test asks a hub."""

import gc
import logging
import os
import sys
from pathlib import Path

import pytest
from effort import histories
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # or Ray leaves a token in the home folder
# Ray runs its workers at niceness 15: beside busy tests of other files an actor starts in minutes.
os.environ.setdefault("RAY_worker_niceness", "0")
HERE = Path(__file__).parent
# Of packages that are not installed here; and of what processes run as they start.
collect_ignore = ["bridges/agents", "bridges/tasksets", "startup"]
_PATHS = (str(HERE / "startup"), os.environ.get("PYTHONPATH", ""))
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, _PATHS)))
ONE_ENGINE = (
    "tests/rollout/test_engine.py",
    "tests/rollout/test_updates_in_flight.py",
    "tests/rollout/test_missed_updates.py",
    "tests/rollout/test_cuts.py",
)
ONE_SERVER = (  # of ranks, which imports all that they need: 6 s of a core
    "tests/training/test_fsdp.py",
    "tests/training/test_audit.py",
    "tests/training/test_meters.py",
    "tests/training/test_old_policy.py",
    "tests/training/test_states_on_ranks.py",
    "tests/checkpoint/test_checkpoint_tensors.py",
    "tests/checkpoint/test_shared_folder.py",
    "tests/run/test_weights_publishing.py",
    "tests/run/test_from_nothing.py",
    "tests/weight_sync/test_collector.py",
    "tests/algorithms/distillation/test_distillation.py",
    "tests/algorithms/test_dense_kl.py",
)
TOGETHER = {file: group[0] for group in (ONE_ENGINE, ONE_SERVER) for file in group}
ROOMS = (
    "training", "model", "batching", "algorithms", "environments", "environments/chat", "gateway",
    "rollout", "telemetry", "viewing",
)  # fmt: skip
sys.path[:0] = [str(HERE), *(str(HERE / room) for room in ROOMS)]

gc.disable()  # until all is imported: a third of the time that collecting the tests takes

# On a busy machine the same example may take ten times as long as it did before.
settings.register_profile("any-machine", deadline=None, max_examples=histories(50, full=500))
settings.load_profile("any-machine")


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(gc.unfreeze)  # after pytest's own last collection of garbage


def pytest_collection_finish() -> None:
    gc.freeze()  # millions of objects that live as long as the process: nobody looks at them again
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A command that ran in this process before has set how much the package logs."""
    logging.getLogger("async_grpo").setLevel("NOTSET")


class FilesTogether(LoadFileScheduling):
    """A process takes a file at a time, and all files that share an engine or a server of ranks."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    return FilesTogether(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start clusters and engines come first: those of seconds fill up the end.

    Of several that run at a time the last one would otherwise be a long one, alone. Those of
    tests/integration share a cluster, which ends with the last of them.
    """
    long = {item.path for item in items if item.get_closest_marker("integration")}
    shared = HERE / "integration"
    items.sort(key=lambda item: (shared not in item.path.parents, item.path not in long))
    if needy := [item for item in items if item.get_closest_marker("gpu")]:
        import torch

        if not torch.cuda.is_available():
            for item in needy:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA device"))
