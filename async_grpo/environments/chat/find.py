"""From a model and the name that `--renderer` gives to a renderer; loads the model's tokenizer.

The package `renderers` knows families of models by hand. Among them those that think, whose
templates drop old thoughts, and those with tool calls in forms of their own.
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
    with LOADING:  # transformers fails where several threads import it at once
        return _tokenizer(model)


@functools.cache
def _tokenizer(model: str) -> Tokenizer:
    from transformers import AutoTokenizer  # seconds, which only who chats is to wait

    return AutoTokenizer.from_pretrained(model)


@functools.cache
def find_renderer(model: str, name: str = AUTO) -> Renderer:
    """The renderer `name`; auto: of the model's family where its name says that, else its template.

    Raises `ConfigError` for a name that is none, `UnfitModel` for a model that it cannot serve.
    """
    tokenizer = find_tokenizer(model)
    name = (known_family(model) or TEMPLATE) if name == AUTO else name
    if name == TEMPLATE:
        return TemplateRenderer(tokenizer)
    return library_renderer(tokenizer, name=name)


def library_renderer(tokenizer: Tokenizer, *, name: str) -> Renderer:
    """The library's renderer `name`.

    Raises:
        ConfigError: there is none of that name, or no library.
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
    known = sorted(set(RENDERER_REGISTRY) - {"default"})  # which knows no tools, and extends none
    if name not in known:
        names = ", ".join(["auto", "template", *known])
        raise ConfigError(f"--renderer must be one of {names}, got {name!r}")
    try:
        return LibraryRenderer(tokenizer, create_renderer(tokenizer, config_from_name(name)))
    except Exception as error:  # assertions, KeyErrors: whatever a token that is missing causes
        raise UnfitModel(
            f"--renderer {name} does not fit the tokenizer of {tokenizer.name_or_path} ({error}): "
            "name that of the model's family, or --renderer auto"
        ) from error


def known_family(folder: str) -> str:
    """The library's renderer of a model from the hub, by its exact name; empty: it has none."""
    try:
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return ""
    snapshot = re.search(r"models--([^/]+)--([^/]+)/snapshots/", folder)
    name = "/".join(snapshot.groups()) if snapshot else folder
    return str(MODEL_RENDERER_MAP.get(name, ""))


class LibraryRenderer:
    """See `Renderer`: the library's."""

    is_plain = False

    def __init__(self, tokenizer: Tokenizer, renderer: Any) -> None:
        self._renderer = renderer
        self._cleaner = Cleaner(tokenizer)
        self.stop_token_ids = tuple(renderer.get_stop_token_ids())
        self.render([{"role": "user", "content": "a"}])  # which raises where tokens are missing

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """See `Renderer`."""
        return _checked(
            self._renderer.render_ids(
                self._cleaner.messages(messages),
                tools=self._cleaner.tools(tools) or None,
                add_generation_prompt=True,
            )
        )

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
        bridged = self._renderer.bridge_to_next_turn(
            list(prompt_ids),
            list(sampled_ids),
            self._cleaner.messages(messages),
            tools=self._cleaner.tools(tools) or None,
        )
        if bridged is None or list(bridged.token_ids[: len(known)]) != known:
            return None
        return _checked(bridged.token_ids)


def _call(parsed: Any) -> ToolCall:
    """A call as we know it; one of an undeclared tool is refused where it would be called."""
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
