"""The fields that both completion routes take: their ranges, and what is refused because it would change the answer.

Unknown fields are ignored, as OpenAI-compatible servers do. Fields known to us whose effect we do not have are refused
unless they ask for nothing: an answer that quietly lacks what was asked for is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from tidelane.engine.http.errors import BadRequest
from tidelane.engine.request import ServiceTier

MAX_CHOICES = 128
_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024
_MAX_BIASES = 1024
_MAX_SALT_CHARS = 256

_T = TypeVar("_T", bound="Body")


def _stop_strings(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(stops) > _MAX_STOPS:
        raise PydanticCustomError("stop", f"must hold at most {_MAX_STOPS} strings")
    if not all(1 <= len(stop) <= _MAX_STOP_CHARS for stop in stops):
        raise PydanticCustomError("stop", f"must hold strings of 1 to {_MAX_STOP_CHARS} characters")
    return tuple(stops)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > _MAX_BIASES:
        raise PydanticCustomError("bias", f"must be an object of at most {_MAX_BIASES} token ids and numbers")
    biases = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise PydanticCustomError("bias", "must have token ids as keys")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError("bias", "must have numbers from -100 to 100 as values")
        biases.append((int(key), float(bias)))
    return tuple(biases)


def _top_k(value: int) -> int | None:
    # 0 and -1 both mean "no limit" in servers that clients come from.
    return value if value > 0 else None


def _salt(value: str) -> str:
    if len(value) > _MAX_SALT_CHARS:
        raise PydanticCustomError("salt", f"must be a string of at most {_MAX_SALT_CHARS} characters")
    return value


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(BaseModel):
    """What is common to chat and completions."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(_top_k)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_logit_bias)] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings)] = ()
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] = []
    ignore_eos: bool = False
    cache_salt: Annotated[str, AfterValidator(_salt)] = ""
    service_tier: Literal["auto", "default", "priority", "flex"] = "auto"

    @property
    def tier(self) -> ServiceTier:
        return ServiceTier.DEFAULT if self.service_tier == "auto" else ServiceTier(self.service_tier)


# Field -> the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def parse(kind: type[_T], fields: Mapping[str, Any]) -> _T:
    """`fields` as a `kind`. Raises BadRequest, which names the field and says what would be right."""
    for name, harmless in _UNSUPPORTED.items():
        if name in fields and fields[name] not in harmless:
            raise BadRequest(
                f"`{name}` is not supported by this server; leave it out.", param=name, code="unsupported_parameter"
            )
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _bad_field(error.errors(include_url=False)[0]) from None
    if body.stream_options is not None and not body.stream:
        raise BadRequest("`stream_options` needs `stream: true`.", param="stream_options")
    best_of = fields.get("best_of")
    if best_of is not None and best_of != body.n:
        raise BadRequest(
            "`best_of` is not supported; leave it out, or make it equal to `n`.", param="best_of",
            code="unsupported_parameter",
        )  # fmt: skip
    return body


def _bad_field(detail: ErrorDetails) -> BadRequest:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return BadRequest(f"`{name}` is missing.", param=name, code="missing_required_parameter")
    return BadRequest(f"`{name}` {_rule(detail)}; got {_shown(detail['input'])}.", param=name, code="invalid_value")


def _rule(detail: ErrorDetails) -> str:
    """What the field must be, in words of JSON."""
    context = detail.get("ctx", {})
    match detail["type"]:
        case "greater_than_equal":
            return f"must be at least {_number(context['ge'])}"
        case "greater_than":
            return f"must be above {_number(context['gt'])}"
        case "less_than_equal":
            return f"must be at most {_number(context['le'])}"
        case "less_than":
            return f"must be below {_number(context['lt'])}"
        case "too_short":
            return f"must hold at least {context['min_length']}"
        case "too_long":
            return f"must hold at most {context['max_length']}"
        case "dict_type" | "model_type" | "model_attributes_type":
            return "must be an object"
        case "list_type" | "tuple_type":
            return "must be a list"
        case "int_type" | "int_from_float":
            return "must be a whole number"
        case "float_type":
            return "must be a number"
        case "bool_type":
            return "must be true or false"
        case _:
            return detail["msg"].replace("Input should be", "must be").replace("a valid string", "a string")


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _shown(value: Any) -> str:
    # repr() of a huge int raises, and of a huge list takes long.
    if isinstance(value, int) and abs(value) > 10**40:
        return "a huge number"
    if isinstance(value, list | dict | tuple):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return repr(value[:80] if isinstance(value, str) else value)
