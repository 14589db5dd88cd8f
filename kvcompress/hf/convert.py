"""What turning a model into that of a method needs, whatever the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from .adapters import carry_conversion
from .attach import attach, base_model, detach, facts_of, is_attached
from .facts import Facts
from .guard import guard
from .method import Method, method_of, saved_method, set_method

M = TypeVar("M", bound=Method)


def install(
    model: nn.Module,
    method: M,
    check: Callable[[Any, Facts], Any],
    *,
    made_for: Any = None,
    refused: Callable[[Any], Any] | None = None,
) -> M:
    """Gives an attached or plain model a method, and attaches it. check: what the method needs besides check_facts.
    made_for: whose check_model says whether this is the model; None: the config's. refused: may know a better reason
    why a model cannot be attached.

    Raises ValueError, and leaves the model as it was, if it cannot be attached, is converted already, or a check fails.
    """
    decoder = base_model(model)
    if not isinstance(method.config, method.config_class):
        wanted = method.config_class.__name__
        raise TypeError(f"config must be a {wanted}, got {type(method.config).__name__}")
    if saved_method(decoder) is not None:
        raise ValueError(f"model must not be converted yet, got one with config.kvcompress = {saved_method(decoder)}")
    ours = not is_attached(model)
    if ours:
        try:
            attach(model)
        except ValueError:
            if refused is not None:
                refused(decoder)
            raise
    try:
        (made_for or method.config).check_model(decoder.config)
        facts = facts_of(decoder)
        facts.check_alone(f"conversion to {method.title}")
        method.check_facts(decoder, facts)
        check(decoder, facts)
    except BaseException:
        if ours:
            detach(model)
        raise
    method.store(decoder)
    set_method(decoder, method)
    guard(model, decoder)
    carry_conversion(model)
    return method


def installed(model: nn.Module, kind: type[M], how: str) -> M:
    """The method of an attached model that was converted to this one by `how`. Raises ValueError for another."""
    found = method_of(base_model(model))
    if found is not None and not isinstance(found, kind):
        raise ValueError(
            f"{type(model).__name__} must be converted to {kind.title}, got one that is converted to {found.title}; a "
            "model takes one method: start from the original"
        )
    if found is None:
        raise ValueError(
            f"{type(model).__name__} must be converted to {kind.title} and attached: {how}, or "
            "kvcompress.attach(model) after loading a converted one"
        )
    return found


def check_kept(config: Any, given: dict[str, Any]) -> None:
    """Raises ValueError for a field given that is another one in the config of a converted model."""
    for name, value in given.items():
        if (own := getattr(config, name)) != value:
            raise ValueError(f"{name} must be {own!r}, as the model was converted, or not given; got {value!r}")
