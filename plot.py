#!/usr/bin/env python
"""Plots the metrics of runs: `python plot.py plot --help`."""

from async_grpo.cli.use_run import plot_commands as main

if __name__ == "__main__":
    main(prog_name="plot.py")
