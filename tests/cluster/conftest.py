import sys
from pathlib import Path

# `scripted`: an event loop whose clock jumps, and handles of actors that are none.
sys.path.insert(0, str(Path(__file__).parents[1] / "batching"))
