"""Whether two models are the same: their configs, and some numbers of every weight."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

_SAMPLES = 32  # numbers of a weight that are looked at, spread evenly
# fields of a config that change nothing of what a cache holds
_IGNORED = {
    "architectures", "attn_implementation", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "name_or_path", "pad_token_id", "problem_type", "return_dict", "tokenizer_class", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip


def fingerprint(decoder: Any) -> dict[str, Any]:
    """Of a decoder, as JSON has it: {"class", "dtype", "config", "weights"}; the last is a SHA-256 of 32 numbers of
    each parameter, so that it costs next to nothing. Raises ValueError for a model whose weights are not loaded."""
    hashed, samples = hashlib.sha256(), dict[torch.device, list[Tensor]]()
    for name, parameter in decoder.named_parameters():
        if parameter.device.type == "meta":
            raise ValueError(f"model must hold its weights, but {name} is on the meta device")
        flat = parameter.detach().reshape(-1)
        hashed.update(f"{tuple(parameter.shape)}{parameter.dtype}".encode())
        if flat.numel():
            count = min(_SAMPLES, flat.numel())
            places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64, device="cpu").long()
            samples.setdefault(flat.device, []).append(flat[places.to(flat.device)].view(torch.uint8))
    for parts in samples.values():
        hashed.update(torch.cat(parts).cpu().numpy().tobytes())
    config = {
        name: value
        for name, value in decoder.config.to_dict().items()
        if name not in _IGNORED and not name.startswith(("_", "output_"))
    }
    return {
        "class": type(decoder).__name__,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "config": json.loads(json.dumps(config, default=str, sort_keys=True)),
        "weights": hashed.hexdigest(),
    }


# fields that tell models apart, those that say most first
_FIRST = ("kvcompress", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def difference(saved: dict[str, Any], own: dict[str, Any]) -> str | None:
    """In what two fingerprints differ, in words; None = in nothing."""
    if saved["class"] != own["class"]:
        return f"class {saved['class']}, this one {own['class']}"
    before, now = saved["config"], own["config"]
    if before == now and saved["dtype"] != own["dtype"]:  # the same, as far as can be told
        return (
            f"dtype {saved['dtype']}, this one {own['dtype']}: load the model with dtype=torch.{saved['dtype']} "
            f"(--dtype {saved['dtype']})"
        )
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        names.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
        some = ", ".join(f"{name} = {_short(before.get(name))} (here {_short(now.get(name))})" for name in names[:2])
        return f"config.{some}" + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    return None if saved["weights"] == own["weights"] else "other weights"


def _short(value: Any) -> str:
    """Of a conversion, a dozen fields, its method alone."""
    return f"method {value['method']!r}" if isinstance(value, dict) and "method" in value else repr(value)
