"""Runs from a script or a notebook: `async_grpo.train`, `start` and their results."""
