"""What distillation costs, and what it reaches: `python -m benchmarks.distillation`."""
