"""Helpers that several rooms' tests import by name lie in these folders; no test asks a hub."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # or Ray leaves a token in the home folder
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "training"), str(HERE / "batching")]

# On a busy machine the same example may take ten times as long as it did before.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start clusters and engines come first: those of seconds fill up the end.

    Of several that run at a time the last one would otherwise be a long one, alone.
    """
    long = {item.path for item in items if item.get_closest_marker("integration")}
    items.sort(key=lambda item: item.path not in long)
    if needy := [item for item in items if item.get_closest_marker("gpu")]:
        import torch

        if not torch.cuda.is_available():
            for item in needy:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA device"))
