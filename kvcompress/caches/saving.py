"""Caches in files: safetensors with JSON in its header, no code; memory-mapped when they are read."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..hf.attach import base_model
from ..hf.fingerprint import difference, fingerprint
from ..hf.method import PassCache
from ..support.files import staged
from ..support.names import file_of
from .encoding import Decoder, Encoder, UnknownClass
from .former import SIZED, UNSIZED, as_now

FORMAT = "kvcompress caches 6"  # 6: what a layer has of a sequence once


def save_caches(caches: Sequence[Any], path: str | os.PathLike[str], model: nn.Module | None = None) -> Path:
    """Saves caches of one model in one file; pages that forks share are written once, and are shared after loading.

    caches: forks of one prompt, or any; complete ones. path: of the file, usually .safetensors; written whole or not
    at all (a temporary name in the same folder, then renamed). model: that they belong to; None = the one that they
    were used with last. Returns the path. Copies of the pages in use exist while it writes.
    Raises ValueError for caches of several models or of none, and a path that is a folder or in none; RuntimeError for
    an incomplete one.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a file's name, behind the caches, got {type(path).__name__}")
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise ValueError(f"path must be a file in a folder that exists, got {path}")
    for cache in caches:
        if not isinstance(cache, PassCache):
            raise ValueError(f"caches must be kvcompress caches, got {type(cache).__name__}")
    for cache in caches:
        cache.check_complete()
    if not caches:
        raise ValueError("caches must hold at least one, got none")
    decoders = [cache.decoder for cache in caches] if model is None else [base_model(model)]
    decoder = decoders[0]
    if decoder is None or any(other is not decoder for other in decoders):
        what = "are of several models" if decoder is not None else "were not used with a model that is still there"
        raise ValueError(f"model must be given where caches {what}: save(path, model)")
    if model is not None:
        for cache in caches:
            cache.check_model(decoder)
    with torch.no_grad():
        encoder = Encoder(caches)
        encoded = [encoder.encode(cache) for cache in caches]
    text = json.dumps(
        {
            "format": FORMAT,
            "model": fingerprint(decoder),
            "caches": encoded,
            "objects": encoder.objects,
            "checks": {name: _check(x) for name, x in encoder.tensors.items()},
        },
        allow_nan=False,
    )
    _need_no_other(Path(path))
    with staged(path) as temporary:
        save_file(encoder.tensors, temporary, {"kvcompress": text, "check": str(zlib.crc32(text.encode()))})
    return Path(path)


def _need_no_other(path: Path) -> None:
    """Raises ValueError for what is there already and is no saved cache: it would be lost."""
    if not path.exists():
        return
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            ours = "kvcompress" in (file.metadata() or {})
    except (SafetensorError, OSError):
        ours = False
    if not ours:
        raise ValueError(f"path must be new, or a file that save wrote, got {path}, which holds something else")


def load_caches(
    path: str | os.PathLike[str], model: nn.Module, *, verify: bool = True, classes: Sequence[type] = ()
) -> list[Any]:
    """What save_caches or cache.save wrote, to go on with in any process.

    path: the file, or its name on the Hub, owner/name/file, of owner/name cache.safetensors. model: the one that
    filled them: its class, dtype, config and some numbers of each weight are compared. verify: reads the file once to
    see whether it is damaged; without it nothing is read before it is used, as tensors on the CPU are the file, mapped
    into memory (writing to them does not change it). classes: of pruners and budgets of one's own, which a file cannot
    bring along.
    Raises FileNotFoundError, ConnectionError where the Hub cannot be reached, and ValueError for a file that is
    damaged, no saved cache, of another version or model, or that holds what is in no class known; TypeError for
    arguments of another kind.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a path, got {type(path).__name__}: load_cache(path, model)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}: load_cache(path, model)")
    path = file_of("path", os.fspath(path), "cache.safetensors")
    if not path.is_file():
        raise FileNotFoundError(f"path must be a file that save wrote, got {path}")
    decoder = base_model(model)
    try:
        opened = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged, or no saved cache: {error}") from None
    with opened as file:
        saved = _header(path, file.metadata() or {})
        if (words := difference(saved["model"], fingerprint(decoder))) is not None:
            raise ValueError(f"{path} is of another model than {type(decoder).__name__}: saved with {words}")
        if verify:
            for name, check in saved["checks"].items():
                if name not in file.keys() or _check(file.get_tensor(name)) != check:  # noqa: SIM118
                    raise ValueError(f"{path} is damaged: its tensor {name} is not what was saved")
        devices = {parameter.device for parameter in decoder.parameters()}
        if len(devices) != 1:
            raise ValueError(f"model must be on one device for saved caches, got {sorted(map(str, devices))}")
        device = devices.pop()

        def tensor(name: str, host: bool) -> Tensor:
            found: Tensor = file.get_tensor(name)
            return found if host else found.to(device)

        made = Decoder(saved["objects"], tensor, device, classes)
        try:
            caches = [made.decode(one) for one in saved["caches"]]
        except UnknownClass as error:
            raise ValueError(
                f"{path} holds a {error}, which is no class of kvcompress: give it, load_cache(..., classes=[...])"
            ) from None
        except (ImportError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} was written by another version of kvcompress: {error!r}") from None
    for cache in caches:
        cache.check_model(decoder)
        cache.belongs_to(decoder)
    return caches


def load_cache(
    path: str | os.PathLike[str], model: nn.Module, *, verify: bool = True, classes: Sequence[type] = ()
) -> Any:
    """The one cache that cache.save wrote.

    path: the file. model, verify, classes: as in load_caches. Raises what that does, and ValueError where the file
    holds several.
    """
    caches = load_caches(path, model, verify=verify, classes=classes)
    if len(caches) != 1:
        raise ValueError(f"{path} holds {len(caches)} caches: load_caches gives them all")
    return caches[0]


def _check(x: Tensor) -> int:
    return zlib.crc32(x.reshape(-1).view(torch.uint8).numpy())


def _header(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    text = metadata.get("kvcompress")
    if text is None:
        raise ValueError(f"{path} is a safetensors file, but not one that a cache was saved in")
    if metadata.get("check") != str(zlib.crc32(text.encode())):
        raise ValueError(f"{path} is damaged: its header is not what was saved")
    saved = json.loads(text)
    if not isinstance(saved, dict):
        raise ValueError(f"{path} is damaged: its header holds no fields")
    if saved.get("format") in (SIZED, UNSIZED):
        return as_now(saved)
    if saved.get("format") != FORMAT:
        raise ValueError(
            f"format of {path} must be {FORMAT!r}, got {saved.get('format')!r}: another version wrote it, "
            "read the text anew"
        )
    return saved
