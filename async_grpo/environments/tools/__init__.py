"""Tools that a model calls between its turns: Python functions, code in the jail, MCP servers.

    a reply's calls ─▶ Toolbox.answer ─▶ Tool.call of each ─▶ messages that the model reads next

`function.py`, `code.py` and `mcp.py` are kinds of tools; `environment.py` is the environment of a
model that calls tools until it answers. No Ray or torch here.
"""
