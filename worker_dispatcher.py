#!/usr/bin/env python
"""Start generation or logprob workers on this node: `python worker_dispatcher.py --help`."""

from async_grpo.cli.worker import main

if __name__ == "__main__":
    main()
