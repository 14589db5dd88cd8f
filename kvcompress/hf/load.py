"""Models in one line: loaded, converted as their config or their adapter's says, and attached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import cached_file

from ..support.extras import need_packages
from ..support.names import check_name
from .adapters import FIELD
from .attach import attach, base_model, facts_of
from .guard import guard
from .method import restored_method, saved_method, set_method

_ADAPTER = "adapter_config.json"


def from_pretrained(name: str | Path, **options: Any) -> Any:
    """AutoModelForCausalLM.from_pretrained, and attach; in evaluation mode.

    name: smollm2, or a folder or name on the Hub, of a model, converted or not, or of an adapter (PEFT) that a
    converted model was trained with: its base is loaded and converted as the adapter's config says, and the adapter put
    on it. options: of AutoModelForCausalLM.from_pretrained.
    Returns the model: generate makes the cache of its method where it is given none.
    Raises ValueError for a model that cannot be attached, a conversion that this version does not know, and an adapter
    of another conversion than its base; OSError for what is not there: ConnectionError if the Hub cannot be reached;
    ImportError for an adapter where PEFT is not installed.
    """
    return load_named(check_name("name", name, **_of_hub(options)), **options)


def load_named(name: str | Path, **options: Any) -> Any:
    """from_pretrained of what check_name has returned."""
    from ..models import load_example_model, shipped_retrofit

    adapter = _adapter_config(str(name), options)
    if adapter is None:
        if (shipped := shipped_retrofit(name)) is None:
            model: Any = AutoModelForCausalLM.from_pretrained(name, **options)
        else:
            dtype = options.get("dtype", torch.bfloat16)
            model, _ = load_example_model(retrofit=shipped, dtype=torch.bfloat16 if dtype == "auto" else dtype)
        attach(model)
        return model.eval()
    base = adapter.get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{_ADAPTER} of {str(name)!r} must name its base model (base_model_name_or_path), got {base!r}"
        )
    need_packages("an adapter", "peft")
    model = AutoModelForCausalLM.from_pretrained(base, **options)
    attach(model)
    if (saved := adapter.get(FIELD)) is not None:
        convert_base(model, saved)
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(name)).eval()


def convert_base(model: nn.Module, saved: dict[str, Any]) -> None:
    """Makes an attached model the one that an adapter stands on. saved: what its config says of the conversion.

    Raises ValueError for a model that is converted otherwise, and for a conversion that does not fit it.
    """
    decoder = base_model(model)
    before = saved_method(decoder)
    if before is not None:
        if before != saved:
            raise ValueError(f"the adapter's base must be converted by {saved}, got a model converted by {before}")
        return
    decoder.config.kvcompress = saved
    try:
        method = restored_method(decoder)
        assert method is not None
        method.check_facts(decoder, facts_of(decoder))
        method.fit_base(decoder, facts_of(decoder))
    except BaseException:
        del decoder.config.kvcompress
        raise
    set_method(decoder, method)
    guard(model, decoder)


def _adapter_config(name: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """What an adapter's config says; None for a model."""
    path = cached_file(
        name, _ADAPTER, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False, **_of_hub(options),
    )  # fmt: skip
    if path is None:
        return None
    found = json.loads(Path(path).read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def _of_hub(options: dict[str, Any]) -> dict[str, Any]:
    """Those that say where and how to look for a name."""
    return {key: options[key] for key in ("revision", "token", "cache_dir", "local_files_only", "subfolder")
            if key in options}  # fmt: skip
