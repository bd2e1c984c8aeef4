"""Chat templates: from messages to the one text that a chat model was trained on.

A template is Jinja that comes with a model, hence from strangers: it runs in Jinja's immutable
sandbox, sees plain JSON values only, and gets the few functions that templates in the wild use
(``raise_exception``, ``strftime_now``, the filter ``tojson``, loop controls, ``generation``
blocks). What it renders equals what transformers renders.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantforge.errors import CheckpointError, UsageError

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients pass a message's reasoning; templates read the first or second."""

RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template can raise on messages that it was not written for."""


class ChatTemplate:
    """A compiled template. `where` names its file in errors; a bad one is a `CheckpointError`."""

    def __init__(self, source: str, *, where: str) -> None:
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template of {where} is not valid Jinja: line {error.lineno}: {error}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The text of `messages`; `variables` are the special tokens and what the caller adds.

        Raises `UsageError` if the template refuses the messages or fails on them.
        """
        values = {"tools": None, "documents": None, **variables}
        try:
            return self._template.render(
                **_plain(values),
                messages=[_plain_message(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
            )
        except RENDER_ERRORS as error:
            raise UsageError(f"the chat template does not take these messages: {error}") from error


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without None values, with its reasoning under each name that templates read."""
    if not isinstance(message, Mapping):
        raise UsageError(f"a chat message must be a mapping with 'role', not {message!r}")
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy of `value` made of JSON's types alone, so that the sandbox holds no live object."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise UsageError(f"a chat message holds a {type(value).__name__}; use JSON values only")


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it only has a scope."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes of Jinja's own filter, which is meant for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
