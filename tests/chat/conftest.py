import sys
from pathlib import Path

# `players`: turns that were sampled by nobody.
sys.path.insert(0, str(Path(__file__).parents[1] / "environments"))
