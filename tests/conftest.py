"""Helpers that several rooms' tests import by name lie in these folders; no test asks a hub."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # or Ray leaves a token in the home folder
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "training")]
