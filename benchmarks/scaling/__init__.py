"""The service on a virtual clock, from one engine to 10,000 devices: see docs/scaling.md.

What decides is the service's own code (admission, balancer, ledger, rounds and packing);
what takes time is a rate, each with its source in `hardware`.
"""
