"""Messages to token ids and back, so that what a model sampled is never tokenised again.

    messages ─▶ dialogue.prompt ─▶ base.Renderer.render, or .extend of the turn before ─▶ ids
    ids that were sampled ─▶ dialogue.heard ─▶ base.Renderer.parse ─▶ a reply, with its tool calls

`template.py` renders by the model's own chat template, `library.py` by the package `renderers`;
`find.py` chooses. No Ray, torch or vLLM here; `find.py` alone loads a tokenizer.
"""
