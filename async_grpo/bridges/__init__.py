"""Other people's environments, as they are: `verifiers` and OpenEnv.

`verifiers_bridge.py` alone runs in another Python: the one where `verifiers` is installed.
"""
