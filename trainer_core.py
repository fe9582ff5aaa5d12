#!/usr/bin/env python
"""Train: `torchrun --nproc-per-node N trainer_core.py --help`."""

from async_grpo.cli.train import main

if __name__ == "__main__":
    main()
