"""Runs from a script or a notebook: what `async_grpo.train` and its neighbours are."""
