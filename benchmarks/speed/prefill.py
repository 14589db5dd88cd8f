"""Reading long prompts: dense, fixed memory (FM), incremental memory (IM), with decremental chunks (IMDC).

    python benchmarks/speed/prefill.py [--quick] [--json FILE] [--lengths 32768 131072 1000000] [--model NAME]
                                 [--chunk-size 1024] [--memory-size 1024] [--dense-tokens 32768] [--repeats 3]

Every row reads the same source text through a memory of `memory` tokens and chunks of `chunk` (mean), then decodes one
token. Rows of one pruner and length take turns with their FM row, `repeats` times (once beyond 65,536 tokens); all
figures of a row are those of its median run.

seconds     time to first token. tok/s of it
attention   seconds in attention over memory and chunk. model: seconds in the model's matrix products
other       share of the time in neither; own: the part of it that is the cache's: rotation, scores, choice, copies. The
            rest is the model's norms, activations and residuals, which weigh less the wider a model is (--width)
ratio       FM's seconds over this row's. predicted: equation 4, 1 + r*(q - 1), r = this row's share in attention
attn ratio  FM's attention seconds over this row's. q: (m_max + c)/(m_hat + c) of equation 4; pairs: attended pairs of
            FM over this row's, the most that a kernel can gain which skips what the causal mask hides
cache       peak bytes of memory, chunk and their rotated copy while reading, seen before each layer's attention
process     peak resident memory of the process over what it held before the row

The dense row is the model as transformers runs it: one forward pass, SDPA, logits of the last token alone; up to
--dense-tokens. Without logits nothing grows with the prompt but its ids, which are read from a memory-mapped file.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.tasks import Writer, dense_nbytes
from kvcompress import IterativeCache, ops, prefill
from kvcompress.caches.iterative_layer import IterativeLayer
from kvcompress.models.text import long_text
from kvcompress.planner import Plan
from kvcompress.pruners import Pruner, SnapKV, StreamingLLM
from kvcompress.support.process_memory import PeakMemory

SIZES = {  # lengths of prompts, tokens of a chunk and of memory
    "full": ([32768, 131072, 1_000_000], 1024),
    "quick": ([8192], 1024),
    "tiny": ([512], 128),
}
SCHEDULES = ("linear", "square", "sqrt", "square-sqrt", "adaptive")
PRUNERS: dict[str, Pruner] = {"SnapKV": SnapKV(), "StreamingLLM": StreamingLLM()}


@dataclass(frozen=True)
class Method:
    name: str
    schedule: str = "fixed"
    dynamic: bool = False
    prune: str = "layer"


@dataclass
class Run:
    """One reading, in seconds and bytes."""

    seconds: float
    attention: float
    products: float
    own: float
    cache: int
    process: int | None


class Meter:
    """Seconds in attention and in the model's linear layers, and the cache's peak, while it is on."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.attention = self.products = self.within = 0.0
        self.cache_nbytes = 0
        self._begin = 0.0
        self._undo = ExitStack()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                self._undo.callback(module.register_forward_pre_hook(self._start).remove)
                self._undo.callback(module.register_forward_hook(self._stop).remove)

    def _start(self, *_: Any) -> None:
        self._begin = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.products += time.perf_counter() - self._begin

    def watch(self, cache: IterativeCache) -> None:
        """Times the attention of the readings that follow, and all that layers do in them."""
        attention, attend = ops.attention, IterativeLayer.attend

        def timed(queries, keys, values, **options):  # type: ignore[no-untyped-def]
            # keys are the rotated copy of what the layer joined; its unrotated keys are as large
            self.cache_nbytes = max(self.cache_nbytes, cache.nbytes() + 2 * keys.nbytes + values.nbytes)
            begin = time.perf_counter()
            out = attention(queries, keys, values, **options)
            self.attention += time.perf_counter() - begin
            return out

        def timed_layer(layer, step, *given):  # type: ignore[no-untyped-def]
            begin = time.perf_counter()
            out = attend(layer, step, *given)
            if step.iteration is not None:  # of the prompt
                self.within += time.perf_counter() - begin
            return out

        self._undo.enter_context(mock.patch.object(ops, "attention", timed))
        self._undo.enter_context(mock.patch.object(IterativeLayer, "attend", timed_layer))

    def close(self) -> None:
        self._undo.close()


def _resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


@torch.no_grad()
def read(model: PreTrainedModel, ids: np.ndarray, make: Callable[[], IterativeCache]) -> Run:
    cache, meter = make(), Meter(model)
    meter.watch(cache)
    before, peak, begin = _resident(), PeakMemory(model.device), time.perf_counter()
    try:
        prefill(model, ids[:-1], cache)
        model(torch.tensor([[int(ids[-1])]]), past_key_values=cache)
        seconds = time.perf_counter() - begin
    finally:
        meter.close()
    process = peak.nbytes()
    return Run(
        seconds, meter.attention, meter.products, (meter.within - meter.attention) / seconds, meter.cache_nbytes,
        None if process is None else process - before,
    )  # fmt: skip


@torch.no_grad()
def read_dense(model: PreTrainedModel, ids: np.ndarray) -> Run:
    cache, meter = DynamicCache(config=model.config), Meter(model)
    before, peak, begin = _resident(), PeakMemory(model.device), time.perf_counter()
    model(torch.from_numpy(ids.astype(np.int64))[None], past_key_values=cache, logits_to_keep=1)
    seconds = time.perf_counter() - begin
    meter.close()
    process = peak.nbytes()
    return Run(seconds, 0.0, meter.products, 0.0, dense_nbytes(cache), None if process is None else process - before)


def median(runs: list[Run]) -> Run:
    middle = statistics.median_low(run.seconds for run in runs)
    return next(run for run in runs if run.seconds == middle)


def rows_of(
    model: PreTrainedModel, ids: np.ndarray, pruner_name: str, methods: list[Method], *, chunk: int, memory: int,
    repeats: int,
) -> list[dict[str, Any]]:  # fmt: skip
    pruner = PRUNERS[pruner_name]

    def make(method: Method) -> Callable[[], IterativeCache]:
        return lambda: IterativeCache(
            model.config, memory_size=memory, chunk_size=chunk, pruner=pruner, schedule=method.schedule,
            dynamic=method.dynamic, prune=method.prune,
        )  # fmt: skip

    def plan(method: Method) -> Plan:
        return make(method)().plan_prompt(len(ids) - 1)

    runs: dict[Method, list[Run]] = {method: [] for method in methods}
    read(model, ids[: 3 * chunk], make(methods[0]))  # warm
    for _ in range(repeats):
        for method in methods:
            runs[method].append(run := read(model, ids, make(method)))
            print(f"{len(ids):,} {pruner_name}/{method.name} {run.seconds:.2f} s", file=sys.stderr, flush=True)
    out = []
    fixed = methods[0]
    for method in methods:
        run, fm = median(runs[method]), median(runs[fixed])
        ours = plan(method)
        share, q = run.attention / run.seconds, ours.key_ratio(plan(fixed))
        out.append(
            {
                "name": f"{pruner_name}/{method.name}", "tokens": len(ids), "tokens_per_second": len(ids) / run.seconds,
                **asdict(run), "other": 1 - (run.attention + run.products) / run.seconds,
                "ratio": fm.seconds / run.seconds, "predicted": 1 + share * (q - 1), "share": share, "q": q,
                "attention_ratio": fm.attention / run.attention, "pairs": ours.pair_ratio(plan(fixed)),
                "largest_context": ours.largest_context, "cache_ratio": run.cache / fm.cache,
            }
        )  # fmt: skip
    return out


def methods_of(length: int, *, quick: bool) -> list[Method]:
    """Every schedule up to 200,000 tokens, the linear ones beyond."""
    some = ("linear",) if quick or length > 200_000 else SCHEDULES
    methods = [Method("FM"), *(Method(f"IM {name}", name) for name in some)]
    methods += [Method(f"IMDC {name}", name, dynamic=True) for name in some]
    if length <= 65_536:
        methods += [
            Method("FM, forward", prune="forward"),
            Method("IM linear, forward", "linear", prune="forward"),
            Method("IMDC linear, forward", "linear", dynamic=True, prune="forward"),
        ]
    return methods


def show(rows: list[dict[str, Any]]) -> None:
    def mib(nbytes: int | None) -> str:
        return "" if nbytes is None else f"{nbytes / 2**20:.1f}"

    def number(row: dict[str, Any], name: str, digits: int = 3) -> str:
        return f"{row[name]:.{digits}f}" if name in row else ""

    lines = [
        (
            row["name"], f"{row['tokens']:,}", f"{row['seconds']:.2f}", f"{row['tokens_per_second']:,.0f}",
            number(row, "attention", 2), number(row, "products", 2), number(row, "other"),
            number(row, "own") if "other" in row else "", number(row, "ratio"),
            number(row, "predicted"), number(row, "attention_ratio"), number(row, "q"), number(row, "pairs"),
            mib(row["cache"]), mib(row["process"]),
        )
        for row in rows
    ]  # fmt: skip
    columns = ("name", "tokens", "seconds", "tok/s", "attention", "model", "other", "own", "ratio", "predicted",
               "attn ratio", "q", "pairs", "cache MiB", "process MiB")  # fmt: skip
    print_table("reading prompts", columns, lines, left=("name",))


def random_model(width: int, vocabulary: int) -> PreTrainedModel:
    """Its time is that of a trained one; MLP and groups as in Llama-3-8B."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=4, head_dim=64,
        num_attention_heads=width // 64, num_key_value_heads=max(width // 256, 1), max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--lengths", type=int, nargs="+", default=None, help="tokens of the prompts")
    parse.add_argument("--model", default="example", help="a Hugging Face model by name or folder")
    parse.add_argument("--width", type=int, help="instead: a random Llama of this width, 4 layers, head dim 64")
    parse.add_argument("--chunk-size", type=int, help="mean tokens of a chunk (default: 1,024)")
    parse.add_argument("--memory-size", type=int, help="tokens of the memory (default: 1,024)")
    parse.add_argument("--dense-tokens", type=int, default=32768, help="longest prompt of the dense row, 0 = none")
    parse.add_argument("--repeats", type=int, default=3)
    choice = parse_arguments(parse)
    lengths, size = SIZES[choice.size]
    lengths = choice.lengths or lengths
    chunk, memory = (size if given is None else given for given in (choice.chunk_size, choice.memory_size))
    if min(lengths) < 2 * chunk:
        parse.error(f"argument --lengths: must be at least two chunks, {2 * chunk} tokens, got {min(lengths)}")
    model, tokenizer = load(choice.model, "cpu")
    if choice.width is not None:
        model = random_model(choice.width, len(tokenizer))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, kvcompress.attach(model):
        path = Path(folder) / "ids.bin"
        tokens = np.asarray(
            Writer(tokenizer)(long_text(max(lengths) if choice.model == "example" else 6 * max(lengths))), np.int32
        )
        tokens.tofile(path)
        del tokens
        for length in lengths:
            ids = np.memmap(path, dtype=np.int32, mode="r")[:length]
            repeats = choice.repeats if choice.size == "full" and length <= 65_536 else 1
            if length <= choice.dense_tokens:
                dense = read_dense(model, ids)
                rows.append(
                    {"name": "dense", "tokens": length, "tokens_per_second": length / dense.seconds} | asdict(dense)
                )
            for name in PRUNERS:
                methods = methods_of(length, quick=choice.size != "full")
                rows += rows_of(model, ids, name, methods, chunk=chunk, memory=memory, repeats=repeats)
    show(rows)
    if choice.json is not None:
        write_json(choice.json, rows)


if __name__ == "__main__":
    main()
