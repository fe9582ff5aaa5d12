"""Environments of other projects, unchanged: `verifiers`, OpenEnv, and agents of OpenAI's protocol.

`verifiers_bridge.py` alone runs in another Python: the one where `verifiers` is installed.
"""
