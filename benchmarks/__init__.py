"""What the system does on this machine, measured: one module, one command and one file each.

python -m benchmarks.NAME prints a table and writes benchmarks/results/NAME.json.
"""
