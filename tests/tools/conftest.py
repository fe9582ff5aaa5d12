import sys
from pathlib import Path

# The families of tokenizers, and scripted players.
sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("chat", "environments")]
