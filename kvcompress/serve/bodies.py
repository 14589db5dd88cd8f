"""Bodies of requests, looked at before anything is done with them: every field of its type, and none dropped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

MOST_STOPS = 16  # strings, each of which is looked for in every piece of an answer


class FieldError(ValueError):
    """field: the one that is wrong, as messages[0].role."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field} must {what}")
        self.field = field


Check = Callable[[str, Any], None]  # of a name and a value that is not None; raises FieldError


def error_body(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """An error, as clients of OpenAI's API read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def check_body(body: Mapping[str, Any], fields: Mapping[str, Check], required: str) -> dict[str, Any]:
    """What of a body is given. Raises FieldError for a field that is missing, of another type, or not served."""
    given = {name: value for name, value in body.items() if value is not None}
    if required not in given:
        raise FieldError(required, "be given")
    _check_fields(given, fields, "")
    return given


def _check_fields(given: Mapping[str, Any], fields: Mapping[str, Check], before: str) -> None:
    for name, value in given.items():
        if name not in fields:
            raise FieldError(f"{before}{name[:80]}", "not be given: it is not served")
        fields[name](f"{before}{name}", value)


def _shown(value: Any) -> str:
    """In a line; of what may be nested without end its type alone."""
    if isinstance(value, (list, dict)):
        return f"a JSON {'array' if isinstance(value, list) else 'object'}"
    shown = json.dumps(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


# ---- checks ----


def _of(wish: str, good: Callable[[Any], bool]) -> Check:
    def check(name: str, value: Any) -> None:
        if not good(value):
            raise FieldError(name, f"be {wish}, got {_shown(value)}")

    return check


def _unserved(*neutral: Any) -> Check:
    """For what changes nothing; the first is named."""

    def check(name: str, value: Any) -> None:
        if not any(type(value) is type(x) and value == x for x in neutral):
            wish = f"be {json.dumps(neutral[0])} or not given"
            raise FieldError(name, f"{wish}, got {_shown(value)}: it is not served")

    return check


def _is_text(value: Any) -> bool:
    """A str that is Unicode: half of a surrogate pair can be written in JSON, and read by no tokenizer."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_stops(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    return type(stops) is list and len(stops) <= MOST_STOPS and all(_is_text(stop) and stop for stop in stops)


def _are_tokens(value: Any) -> bool:
    tokens = value if type(value) is list else [value]
    return bool(tokens) and all(type(token) is int and -1 <= token < 1 << 31 for token in tokens)


def _nested(wish: str, fields: Mapping[str, Check]) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not dict:
            raise FieldError(name, f"be {wish}, got {_shown(value)}")
        _check_fields({key: x for key, x in value.items() if x is not None}, fields, f"{name}.")

    return check


def _generation_config(name: str, value: Any) -> None:
    try:
        fields = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        fields = None
    if type(fields) is not dict:
        raise FieldError(name, f"be the text of a JSON object, got {_shown(value)}")
    _nested("", _GENERATION)(name, fields)


def _content(name: str, value: Any) -> None:
    if isinstance(value, str):
        _TEXT(name, value)
        return
    if type(value) is not list or not value:
        raise FieldError(name, f"be text, or a list of parts, got {_shown(value)}")
    for i, part in enumerate(value):
        _part(f"{name}[{i}]", part)


def _part(name: str, part: Any) -> None:
    if type(part) is not dict:
        raise FieldError(name, f"be a JSON object with type and text, got {_shown(part)}")
    if part.get("type") not in _PARTS:
        raise FieldError(
            f"{name}.type",
            f"be {_PARTS[0]}, got {_shown(part.get('type'))}: images, audio, video and files are not served",
        )
    _TEXT(f"{name}.text", part.get("text"))
    _nothing_else(name, part, ("type", "text"))


def _message(name: str, message: Any, also: tuple[str, ...] = ()) -> None:
    if type(message) is not dict:
        raise FieldError(name, f"be a JSON object with role and content, got {_shown(message)}")
    _TEXT(f"{name}.role", message.get("role"))
    _content(f"{name}.content", message.get("content"))
    _nothing_else(name, message, ("role", "content", *also))


def _nothing_else(name: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    """Clients send back what they got, with empty fields."""
    for key, value in given.items():
        if key not in known and not (value is None or value == []):
            raise FieldError(f"{name}.{key[:80]}", "not be given: it is not served")


def _messages(name: str, value: Any) -> None:
    if type(value) is not list or not value:
        raise FieldError(name, f"be a list of one message or more, got {_shown(value)}")
    for i, message in enumerate(value):
        _message(f"{name}[{i}]", message)


def _input(name: str, value: Any) -> None:
    """Of /v1/responses: text, a list of parts, or a list of messages."""
    if isinstance(value, str):
        _TEXT(name, value)
        return
    if type(value) is not list or not value:
        raise FieldError(name, f"be text, or a list of one message or more, got {_shown(value)}")
    parts = type(value[0]) is dict and "role" not in value[0]
    for i, item in enumerate(value):
        if parts:
            _part(f"{name}[{i}]", item)
        else:
            _message(f"{name}[{i}]", item, ("type", "id", "status"))
            _MESSAGE(f"{name}[{i}].type", item.get("type", "message"))


_PARTS = ("text", "input_text", "output_text")
_TEXT = _of("text", _is_text)
_MESSAGE = _of('"message"', lambda x: x == "message")
_FLAG = _of("true or false", lambda x: type(x) is bool)
_COUNT = _of("an integer of at least 1", lambda x: type(x) is int and 1 <= x < 1 << 31)
_POSITIVE = _of("a number above 0", lambda x: _is_number(x) and 0 < x <= 1e9)
_OBJECT = _of("a JSON object", lambda x: type(x) is dict)
_STOPS = _of(f"a string or a list of at most {MOST_STOPS} of them, none empty", _are_stops)
_SHARED: dict[str, Check] = {
    "model": _TEXT,
    "stream": _FLAG,
    "temperature": _of("a number from 0 on", lambda x: _is_number(x) and 0 <= x <= 1e9),
    "top_p": _of("a number above 0, and at most 1", lambda x: _is_number(x) and 0 < x <= 1),
}
_GENERATION = {name: _SHARED[name] for name in ("temperature", "top_p")} | {
    "max_new_tokens": _COUNT, "do_sample": _FLAG, "stop_strings": _STOPS, "repetition_penalty": _POSITIVE,
    "top_k": _of("an integer from 0 on", lambda x: type(x) is int and 0 <= x < 1 << 31),
    "eos_token_id": _of("a token or a list of them", _are_tokens),
}  # fmt: skip
_SHARED |= {
    "generation_config": _generation_config,
    "seed": _of("an integer of 64 bits", lambda x: type(x) is int and -(1 << 63) <= x < 1 << 63),
    "stream_options": _nested("a JSON object", {"include_usage": _FLAG}),  # which the last chunk holds in any case
    # what says who asks, and changes no answer
    "user": _TEXT, "safety_identifier": _TEXT, "prompt_cache_key": _TEXT, "metadata": _OBJECT,
    # what changes answers, but for these values
    "service_tier": _unserved("auto", "default"), "store": _unserved(False), "top_logprobs": _unserved(0),
    "parallel_tool_calls": _unserved(True, False), "tools": _unserved([]), "tool_choice": _unserved("none", "auto"),
}  # fmt: skip
_COMPLETIONS = _SHARED | {
    "max_tokens": _COUNT, "stop": _STOPS, "n": _unserved(1), "logprobs": _unserved(False),
    "presence_penalty": _unserved(0, 0.0), "frequency_penalty": _unserved(0, 0.0), "logit_bias": _unserved({}),
    "response_format": _unserved({"type": "text"}),
}  # fmt: skip
# by endpoint, and what each must have
COMPLETION = _COMPLETIONS | {"prompt": _TEXT, "best_of": _unserved(1), "echo": _unserved(False)}
CHAT = _COMPLETIONS | {
    "messages": _messages, "max_completion_tokens": _COUNT, "chat_template_kwargs": _OBJECT,
    "functions": _unserved([]), "function_call": _unserved("none", "auto"), "modalities": _unserved(["text"]),
}  # fmt: skip
RESPONSE = _SHARED | {
    "input": _input, "instructions": _TEXT, "max_output_tokens": _COUNT, "background": _unserved(False),
    "include": _unserved([]), "truncation": _unserved("disabled"), "text": _unserved({"format": {"type": "text"}}),
}  # fmt: skip
