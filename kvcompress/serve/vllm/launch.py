"""`kvcompress serve`: vLLM's OpenAI server with the plugin, in the place of this process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ...caches.base import trained_length_of
from ...caches.graphs import check_records
from ...caches.pruned import PrunedCache
from ...caches.spec import DENSE, CacheSpec
from ...hf.config import decoder_config
from ...models import EXAMPLE, EXAMPLE_NAME
from ...support.checks import FLOATS, need_dtype
from ...support.extras import need_packages
from ...support.names import check_name
from ..memory import check_free, free_nbytes, free_node_nbytes, memory_nbytes
from .capacity import Capacity
from .engine import Engine
from .passed import Passed
from .settings import BLOCK_SIZE, KEY, Settings

LONGEST = 32_768  # tokens of a request whose prompt is read whole, in one step, where --max-model-len says no other
SHARES = {"cpu": 0.5, "cuda": 0.8}  # of what is free beside the weights; activations and the system need the rest
_OWN = ("127.0.0.1", "localhost", "::1")  # addresses that no other machine reaches
PROGRAM = "kvcompress.serve.vllm.program"


class Command(NamedTuple):
    """vLLM's command. lines: what is said before it starts."""

    arguments: list[str]
    lines: list[str]


def run_serve(
    *, model: str, cache: str | None, memory: str | None, ratio: float | None, swap: str | None, cuda_graphs: bool,
    dtype: str, host: str, port: int, passed: Sequence[str],
) -> None:  # fmt: skip
    """Says what the server holds, and becomes it: signals are vLLM's to answer, and its exit status is ours.

    memory: of all requests' caches, None = a share of what is free. ratio, swap, cuda_graphs: as Settings has them.
    dtype: of the weights.
    passed: vLLM's own options. Raises ValueError for what cannot be, before vLLM starts, ImportError where vLLM or its
    plugin is not installed.
    """
    options = Passed(passed)
    need_dtype(dtype)
    nbytes = None if memory is None else memory_nbytes(memory)
    if cache is not None:
        CacheSpec.parse(cache)
    environment = environment_of(os.environ)
    need_packages("kvcompress serve", "vllm")
    need_plugin()
    command = command_of(model, cache, nbytes, ratio, swap, cuda_graphs, dtype, host, port, options)
    print(*command.lines, sep="\n", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.execve(sys.executable, command.arguments, environment)


def environment_of(given: Mapping[str, str]) -> dict[str, str]:
    """What vLLM is to find in its environment. Raises ValueError for what would undo an option."""
    if space := given.get("VLLM_CPU_KVCACHE_SPACE"):
        raise ValueError(f"VLLM_CPU_KVCACHE_SPACE must not be set beside --memory, got {space!r}")
    made = dict(given)
    if (plugins := given.get("VLLM_PLUGINS")) is not None and KEY not in plugins.split(","):
        made["VLLM_PLUGINS"] = ",".join(filter(None, [plugins, KEY]))
    return made


def need_plugin() -> None:
    """Raises ImportError where vLLM would not find the plugin, and silently compress nothing."""
    if not entry_points(group="vllm.general_plugins", name=KEY):
        raise ImportError("kvcompress serve needs kvcompress to be installed, not only found: pip install kvcompress")


def command_of(
    model: str, cache: str | None, memory: int | None, ratio: float | None, swap: str | None, cuda_graphs: bool,
    dtype: str, host: str, port: int, passed: Passed,
) -> Command:  # fmt: skip
    """The command, of options that were read; memory in bytes. Raises ValueError as run_serve does."""
    folder, config = _config(model, passed.text("--revision"))
    chosen = _dtype(model, config, dtype)
    settings = Settings(cache or CacheSpec.kind_of(config) or DENSE, ratio, swap=swap, cuda_graphs=cuda_graphs)
    engine = Engine(settings, config, chosen, passed.count("--block-size") or BLOCK_SIZE)
    length = _length(engine, trained_length_of(config), passed.count("--max-model-len"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if cuda_graphs:
        check_records("model", device)
    free = free_nbytes(device) if device.type == "cuda" else free_node_nbytes()
    if memory is None:
        memory = int(max(free - _weights(config, chosen), 0) * SHARES[device.type])
    check_free(memory, free, device)
    capacity = Capacity(engine, memory, length, device)
    asked: dict[str, Any] = {"cache": settings.cache, "ratio": ratio, "swap": swap}
    asked = {name: value for name, value in asked.items() if value is not None}
    if cuda_graphs:
        asked["cuda_graphs"] = True
    ours = {
        "--dtype": str(chosen).removeprefix("torch."), "--host": host, "--port": str(port),
        "--kv-cache-memory-bytes": str(capacity.vllm_nbytes),
        "--additional-config": json.dumps(passed.additional_config() | {KEY: asked}),
    }  # fmt: skip
    wanted = {"--max-model-len": str(length), "--served-model-name": model}  # where the user says no other
    title = model
    if decoder_config(config) is not config:  # it takes images or sounds, too
        wanted["--language-model-only"], title = "", f"{model}, text alone"
    if engine.one_pass:
        wanted |= _read_whole(settings.cache, length, passed)
    ours |= {name: value for name, value in wanted.items() if not passed.has(name)}
    arguments = [sys.executable, "-m", PROGRAM, folder, *passed.without("--additional-config")]
    for name, value in ours.items():
        arguments += [name, value] if value else [name]
    lines = capacity.lines(title, f"http://{host}:{port}")
    if host not in _OWN and not passed.has("--api-key") and not os.environ.get("VLLM_API_KEY"):
        lines.append("warning  without --api-key whoever reaches this address is answered")
    return Command(arguments, lines)


def _length(engine: Engine, trained: int, asked: int | None) -> int:
    """Most tokens of a prompt and its answer. A pruner that asks queries behind a prompt needs their positions."""
    cache, most = engine.bounds.cache, trained
    if isinstance(cache, PrunedCache):
        try:
            cache.policy.check_behind(trained, trained, engine.facts.values())
        except ValueError:
            most -= cache.pruner.positions_behind(trained)
        if asked is not None and most < min(trained, asked):
            raise ValueError(
                f"--max-model-len must be at most {most} with {engine.settings.cache}, which asks queries behind "
                f"prompts, got {asked}: the model was trained for {trained}"
            )
    return asked or (min(most, LONGEST) if engine.one_pass else most)


def _read_whole(cache: str, length: int, passed: Passed) -> dict[str, str]:
    """What vLLM needs to be told where a prompt must come in one step; "" = an option without a value."""
    if passed.has("--enable-chunked-prefill"):
        raise ValueError(f"--enable-chunked-prefill must not be given with {cache}, which reads prompts whole")
    tokens = passed.count("--max-num-batched-tokens")
    if tokens is not None and tokens < length:
        raise ValueError(
            f"--max-num-batched-tokens must be at least --max-model-len, {length}, with {cache}, which reads prompts "
            f"whole, got {tokens}"
        )
    return {"--no-enable-chunked-prefill": "", "--max-num-batched-tokens": str(length)}


def _config(model: str, revision: str | None) -> tuple[str, Any]:
    """(what vLLM loads, its config)."""
    try:
        located = str(EXAMPLE) if model == EXAMPLE_NAME else check_name("model", model, revision=revision)
    except OSError as error:
        raise ValueError(str(error)) from None
    try:
        config = AutoConfig.from_pretrained(located, revision=revision)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"model must be the name or folder of a transformers model, got {model!r}: {reason}") from None
    return located, config


def _dtype(model: str, config: Any, dtype: str) -> torch.dtype:
    """Of the weights: as asked, else as the model's files say; the example's float32, as everywhere."""
    if model == EXAMPLE_NAME:
        return need_dtype(dtype) or torch.float32
    own = getattr(decoder_config(config), "dtype", None)
    return need_dtype(dtype) or (own if own in FLOATS else torch.bfloat16)


def _weights(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a model's."""
    auto = AutoModelForCausalLM if decoder_config(config) is config else AutoModel
    with torch.device("meta"):
        return int(auto.from_config(config).num_parameters()) * dtype.itemsize
