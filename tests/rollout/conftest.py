"""Model folders small enough to start an engine in seconds, and one engine of each."""

import contextlib
import os

import pytest
from engine_stack import Stack
from tiny_models import make_model

from async_grpo.rollout.generation_worker import worker_environment

# Importing it, as a search for doctests does, puts stand-ins into this very process.
collect_ignore = ["devices_on_cpu_extension.py"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("untied"), tied=False)


@contextlib.contextmanager
def open_stack(folder, **options):
    """An engine of its own, with other options of its worker."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in worker_environment().items():
            patch.setitem(os.environ, name, value)
        patch.setattr(
            "async_grpo.rollout.engine_args.EXTENSION",
            "withholding_extension.WithholdingExtension",
        )
        stack = Stack(folder, **options)
        yield stack
        stack.close()


@pytest.fixture(scope="module")
def keeping_stack(model_folder):
    with open_stack(model_folder, keep_kv_cache=True) as stack:
        yield stack


# In `make test`, test_lifecycle.py holds an engine to an untied model after every update.
UNTIED = pytest.param("untied", marks=pytest.mark.slow)


@pytest.fixture(scope="session", params=["tied", UNTIED])
def stack(request):
    """Of all files that tests/conftest.py gives to one process: an engine starts in 13 s."""
    folder = "model_folder" if request.param == "tied" else "untied_model_folder"
    with open_stack(request.getfixturevalue(folder)) as stack:
        yield stack
