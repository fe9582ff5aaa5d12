"""Tests that need NVIDIA devices: skipped without, so that `make test-all` runs everywhere."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "rollout"))


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        here = Path(__file__).parent
        for item in items:
            if here in Path(item.path).parents:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA device"))
