"""What a model may call between its turns: Python functions, code in the jail, servers of tools.

    a reply's calls ─▶ toolbox.answer ─▶ base.Tool.call of each ─▶ what the model reads next

`function.py`, `code.py` and `mcp.py` are kinds of tools; `environment.py` is the environment of a
model that calls tools until it answers. No Ray or torch here.
"""
