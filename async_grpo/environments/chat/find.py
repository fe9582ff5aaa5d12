"""Finds the renderer of a model by the name that `--renderer` gives; loads the model's tokenizer.

The package `renderers` has a renderer for each of many families of models. Some of these think,
and their templates drop old thoughts; some write tool calls in another form than Hermes.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Sequence
from typing import Any

from async_grpo.environments.chat.messages import (
    Cleaner,
    Message,
    Renderer,
    Reply,
    Tokenizer,
    ToolCall,
    ToolSpec,
    wrong_arguments,
)
from async_grpo.environments.chat.template import TemplateRenderer
from async_grpo.util.errors import ConfigError, UnfitModel

AUTO, TEMPLATE = "auto", "template"
LOADING = threading.Lock()
PROBLEMS = {
    "invalid_json": "the arguments of this call are no JSON",
    "unclosed_block": "the call does not end",
    "missing_name": "the call names no tool",
    "malformed_structure": "the call does not have the form of one",
}


def find_tokenizer(model: str) -> Tokenizer:
    """Hugging Face's tokenizer of a folder, or of a name on a hub."""
    with LOADING:  # transformers fails if several threads import it at once
        return _tokenizer(model)


@functools.cache
def _tokenizer(model: str) -> Tokenizer:
    from transformers import AutoTokenizer  # takes seconds, so only if a tokenizer is needed

    return AutoTokenizer.from_pretrained(model)


@functools.cache
def find_renderer(model: str, name: str = AUTO) -> Renderer:
    """The renderer `name`; auto: the family's if the model's name is known, else its template.

    Raises `ConfigError` for an unknown name, `UnfitModel` for a model that it cannot serve.
    """
    tokenizer = find_tokenizer(model)
    name = (known_family(model) or TEMPLATE) if name == AUTO else name
    if name == TEMPLATE:
        return TemplateRenderer(tokenizer)
    return library_renderer(tokenizer, name=name)


def library_renderer(tokenizer: Tokenizer, *, name: str) -> Renderer:
    """The renderer `name` of the package `renderers`.

    Raises:
        ConfigError: it has none of that name, or is not installed.
        UnfitModel: the tokenizer is of another family.
    """
    try:
        from renderers import config_from_name, create_renderer
        from renderers.base import RENDERER_REGISTRY, _populate_registry
    except ImportError as error:
        raise ConfigError(
            f"--renderer {name} needs the package renderers, which is not here: `pip install "
            "--no-deps renderers==0.1.12 prime-pydantic-config==0.4.3`"
        ) from error
    _populate_registry()
    known = sorted(set(RENDERER_REGISTRY) - {"default"})  # it has no tools, and extends no prompt
    if name not in known:
        names = ", ".join(["auto", "template", *known])
        raise ConfigError(f"--renderer must be one of {names}, got {name!r}")
    try:
        return LibraryRenderer(tokenizer, create_renderer(tokenizer, config_from_name(name)))
    except Exception as error:  # a missing token may cause any, such as a KeyError
        raise UnfitModel(
            f"--renderer {name} does not fit the tokenizer of {tokenizer.name_or_path} ({error}): "
            "name that of the model's family, or --renderer auto"
        ) from error


def known_family(folder: str) -> str:
    """The name of the package's renderer for a model of the hub, by its exact name; empty: none."""
    try:
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return ""
    snapshot = re.search(r"models--([^/]+)--([^/]+)/snapshots/", folder)
    name = "/".join(snapshot.groups()) if snapshot else folder
    return str(MODEL_RENDERER_MAP.get(name, ""))


class LibraryRenderer:
    """See `Renderer`: one of the package `renderers`."""

    is_plain = False

    def __init__(self, tokenizer: Tokenizer, renderer: Any) -> None:
        self._renderer = renderer
        self._cleaner = Cleaner(tokenizer)
        self.stop_token_ids = tuple(renderer.get_stop_token_ids())
        self.render([{"role": "user", "content": "a"}])  # raises if tokens are missing

    def calls(self, tools: Sequence[ToolSpec], *, is_one: bool) -> None:
        """See `Renderer`; the package does not say how its families write calls."""

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """See `Renderer`."""
        clean, specs = self._cleaner.clean(messages, tools)
        ids = self._renderer.render_ids(clean, tools=specs or None, add_generation_prompt=True)
        return _checked(ids)

    def parse(
        self,
        sampled_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Reply:
        """See `Renderer`."""
        parsed = self._renderer.parse_response(
            list(sampled_ids), tools=list(tools) or None, prompt_ids=list(prompt_ids)
        )
        calls = tuple(map(_call, parsed.tool_calls)) if tools else ()
        return Reply(parsed.content or "", calls, parsed.reasoning_content or "")

    def extend(
        self,
        prompt_ids: Sequence[int],
        *,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """See `Renderer`."""
        known = [*prompt_ids, *sampled_ids]
        clean, specs = self._cleaner.clean(messages, tools)
        bridged = self._renderer.bridge_to_next_turn(
            list(prompt_ids), list(sampled_ids), clean, tools=specs or None
        )
        if bridged is None or list(bridged.token_ids[: len(known)]) != known:
            return None
        return _checked(bridged.token_ids)


def _call(parsed: Any) -> ToolCall:
    """A call of the package as ours; a call of an unknown tool is refused by the `Toolbox`."""
    problem = PROBLEMS.get(str(parsed.status), "")
    arguments = {} if parsed.arguments is None else parsed.arguments
    if not problem and not isinstance(parsed.name, str):
        problem = PROBLEMS["missing_name"]
    if problem := problem or wrong_arguments(arguments):
        return ToolCall(parsed.name or "", {}, problem, parsed.raw)
    return ToolCall(parsed.name, arguments, **({"id": parsed.id} if parsed.id else {}))


def _checked(token_ids: Sequence[int | None]) -> list[int]:
    if None in token_ids:
        raise ValueError("it lacks control tokens of that family")
    return [index for index in token_ids if index is not None]
