"""Chat templates: Jinja from the model's folder, run in a sandbox, as the transformers library runs them.

transformers itself would do, but importing it brings in torch: seconds and half a gigabyte, for a string.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override


class TemplateRefused(Exception):
    """The template will not take these messages; the text says why, in the template's own words where it has any."""


# What a template can run into with messages it does not expect. It is foreign code: no list of ours is complete that
# does not include what any expression may raise.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
)  # fmt: skip


class ChatTemplate:
    """Turns messages into the prompt text that the model was trained on."""

    def __init__(self, source: str, names: Mapping[str, str], now: Callable[[], datetime]) -> None:
        """`names` are the special tokens that templates refer to: bos_token and the like."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._template = environment.from_string(source)
        self._names = dict(names)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        variables = {**self._names, **options, "messages": list(messages), "add_generation_prompt": True}
        try:
            return self._template.render(variables)
        except _TEMPLATE_FAULTS as error:
            raise TemplateRefused(str(error) or type(error).__name__) from error


def _refuse(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
