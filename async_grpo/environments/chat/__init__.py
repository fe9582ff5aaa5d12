"""Messages to token ids and back, so that what a model sampled is never tokenised again.

    messages ─▶ Dialogue.prompt ─▶ Renderer.render, or .extend of the turn before ─▶ ids
    sampled ids ─▶ Dialogue.heard ─▶ Renderer.parse ─▶ a reply, with its tool calls

`messages.py` defines messages, renderers and dialogues; `template.py` renders by the model's chat
template; `find.py` chooses it or a renderer of the package `renderers`. No Ray, torch or vLLM here;
only `find.py` loads a tokenizer.
"""
