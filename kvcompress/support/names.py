"""What a model or a file is called: a folder, a name on the Hub, or smollm2. What can be none is refused unasked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from .smollm2 import SMOLLM2, smollm2_folder

_FILES = ("config.json", "adapter_config.json")  # a model has the first, an adapter the second


def check_name(
    argument: str, name: str | Path, *, local_files_only: bool = False, cache_dir: Any = None,
    revision: str | None = None, token: Any = None, subfolder: str = "",
) -> str:  # fmt: skip
    """What transformers loads: the folder of smollm2, which is made if need be; else the name itself, of a folder, one
    that the Hub's cache has files of, or one that the Hub answers for, be it that there is no such model: transformers
    says that better. Options: as those of transformers' from_pretrained.

    Raises FileNotFoundError for what is meant as a folder and is none, or can be no name on the Hub; ConnectionError
    where the Hub cannot be reached, asked once: transformers would try for half a minute, and twice. ImportError for
    smollm2 without its packages.
    """
    text = str(name)
    if text == SMOLLM2:
        return str(smollm2_folder(argument))
    if text and Path(text).is_dir():
        return text
    wish = _need_name(argument, text)
    if local_files_only or any(
        isinstance(try_to_load_from_cache(text, file, cache_dir=cache_dir, revision=revision), str)
        for file in (f"{subfolder}/{one}" if subfolder else one for one in _FILES)
    ):
        return text
    try:
        get_hf_file_metadata(hf_hub_url(text, _FILES[0], subfolder=subfolder or None, revision=revision), token=token)
    except HfHubHTTPError:
        pass
    except Exception as error:  # of whichever HTTP library the Hub's client is on
        raise _unreachable(wish, error) from None
    return text


def folder_of(argument: str, name: str | Path, files: Sequence[str]) -> Path:
    """A folder that is there, or that of a name on the Hub with these files of it, from its cache where it has them.

    Raises FileNotFoundError for what is neither, ConnectionError where the Hub cannot be reached.
    """
    text = str(name)
    if text and Path(text).is_dir():
        return Path(text)
    wish = _need_name(argument, text)
    if "/" not in text:
        raise FileNotFoundError(f"{wish}: there is no such folder, and names on the Hub are owner/name")
    try:
        return Path(snapshot_download(text, allow_patterns=list(files)))
    except HfHubHTTPError:
        raise FileNotFoundError(f"{wish}: the Hub has none that may be read") from None
    except Exception as error:
        raise _unreachable(wish, error) from None


class _NoFile(ConnectionError, FileNotFoundError):
    """No file here, and no Hub: for who begins anew without one as for who wants to know of the network."""


def file_of(argument: str, name: str | Path, usual: str) -> Path:
    """A file that is there, or that of "owner/name/file" on the Hub, of "owner/name" the usual one, from its cache
    where it has it. The Hub is not asked for what looks like a file that is gone: in a folder that is there, of another
    ending than the usual file, or of any without a third part.

    Raises FileNotFoundError for what is neither; where the Hub cannot be reached, one that is a ConnectionError too.
    """
    path, wish = Path(name), f"{argument} must be a file, or one on the Hub (owner/name/file), got {name}"
    owner, *rest = path.parts or ("",)
    repository = "/".join([owner, *rest[:1]])
    local = path.is_absolute() or str(name).startswith((".", "~")) or Path(owner).exists()
    if path.exists() or local or not rest or path.suffix != ("" if len(rest) == 1 else Path(usual).suffix):
        return path
    try:
        validate_repo_id(repository)
        file = "/".join(rest[1:]) or usual
        if not isinstance(try_to_load_from_cache(repository, file), str):
            get_hf_file_metadata(hf_hub_url(repository, file))  # asked once: the download would try for half a minute
        return Path(hf_hub_download(repository, file))
    except HFValidationError:
        return path
    except HfHubHTTPError:
        raise FileNotFoundError(f"{wish}: the Hub has none that may be read") from None
    except Exception as error:
        raise _NoFile(*_unreachable(wish, error, "file").args) from None


def _need_name(argument: str, text: str) -> str:
    """What is wished for, in words. Raises FileNotFoundError for what no name on the Hub can be."""
    wish, path = f"{argument} must be a folder or a name on the Hub, got {text!r}", Path(text)
    is_path = not text or path.is_absolute() or text.startswith((".", "~")) or text.endswith("/") or len(path.parts) > 2
    if is_path or path.is_file():
        raise FileNotFoundError(f"{wish}: there is no such folder")
    try:
        validate_repo_id(text)
    except HFValidationError:
        raise FileNotFoundError(f"{wish}: there is no such folder, and the Hub has no such names") from None
    return wish


def _unreachable(wish: str, error: Exception, what: str = "folder") -> ConnectionError:
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return ConnectionError(f"{wish}: there is no such {what} here, and the Hub cannot be reached: {reason}")
