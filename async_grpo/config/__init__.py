"""Every option, typed, documented and validated; the command lines are made from these classes."""
