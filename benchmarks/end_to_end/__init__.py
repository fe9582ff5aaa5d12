"""This system and TRL on the same work: `python -m benchmarks.end_to_end`."""
