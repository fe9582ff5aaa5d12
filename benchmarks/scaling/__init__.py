"""Scale on paper: the whole service on a virtual clock, from 8 to 10,000 devices.

What decides is the real code (admission, balancer, ledger, rounds and packing, coalescer); what
takes time is a rate, each with its source in `hardware`. `validation` runs the same simulation with
this machine's rates, beside runs that were measured.
"""
