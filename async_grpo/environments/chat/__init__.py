"""Messages to token ids and back, so that what a model sampled is never tokenised again.

    messages ─▶ dialogue.prompt ─▶ Renderer.render, or .extend of the turn before ─▶ ids
    ids that were sampled ─▶ dialogue.heard ─▶ Renderer.parse ─▶ a reply, with its tool calls

`messages.py` says what a message and a renderer are; `template.py` renders by the model's own chat
template, `find.py` by the package `renderers`, and chooses. No Ray, torch or vLLM here; `find.py`
alone loads a tokenizer.
"""
