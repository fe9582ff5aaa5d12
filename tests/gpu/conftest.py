"""Tests that need NVIDIA devices; tests/conftest.py skips them where there is none."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
