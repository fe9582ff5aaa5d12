"""From a model and the name that `--renderer` gives to a renderer; loads the model's tokenizer."""

from __future__ import annotations

import functools
import threading
from typing import Any

from async_grpo.environments.chat.base import Renderer
from async_grpo.environments.chat.library import known_family, library_renderer
from async_grpo.environments.chat.template import TemplateRenderer

AUTO, TEMPLATE = "auto", "template"
LOADING = threading.Lock()


def find_tokenizer(model: str) -> Any:
    """Hugging Face's tokenizer of a folder, or of a name on a hub."""
    with LOADING:  # transformers fails where several threads import it at once
        return _tokenizer(model)


@functools.cache
def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer  # seconds, which only who chats is to wait

    return AutoTokenizer.from_pretrained(model)


@functools.cache
def find_renderer(model: str, name: str = AUTO) -> Renderer:
    """The renderer `name`; auto: of the model's family where its name says that, else its template.

    Raises `ConfigError` for a name that is none, `ModelError` for a model that it cannot serve.
    """
    tokenizer = find_tokenizer(model)
    name = (known_family(model) or TEMPLATE) if name == AUTO else name
    if name == TEMPLATE:
        return TemplateRenderer(tokenizer)
    return library_renderer(tokenizer, name=name)
