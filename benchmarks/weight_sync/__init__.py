"""What it costs to bring new weights from a trainer into an engine that serves."""
