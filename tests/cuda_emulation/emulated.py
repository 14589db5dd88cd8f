"""Builds csrc/cuda/*.cu with g++ against the emulation and calls the launchers on CPU tensors.

The methods of Kernels have the arguments of kvcompress.reference. No nvcc, no GPU and no built extension is needed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # in the order of kvc_dtype
REDUCTIONS = ["mean", "sum", "max"]
POOLINGS = ["avg", "max"]
INVALID_VALUE, INVALID_CONFIGURATION, LAUNCH_FAILURE = 1, 9, 719


def compile_and_link(folder: Path, sources: list[Path], flags: list[str], link: list[str], name: str) -> Path:
    """Compiles the sources two at a time and links them; the compiler's messages are the error's."""

    def run(command: list[str]) -> None:
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        includes = [f"-I{HERE}", f"-I{ROOT / 'csrc'}"]
        warnings = ["-Wall", "-Wextra", "-Wshadow", "-Werror"]
        run(["g++", "-x", "c++", "-std=c++17", *flags, *warnings, *includes, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    run(["g++", *flags, *link, "-o", str(folder / name), *objects, "-lpthread"])
    return folder / name


def kernel_sources() -> list[Path]:
    """The kernels and what runs them."""
    kernels = [*(ROOT / "csrc" / "cuda").glob("*.cu"), HERE / "block_threads.cpp"]
    # the longest first, so that two compilers end at about the same time
    return sorted(kernels, key=lambda path: -path.stat().st_size)


def load_reference():
    """kvcompress.reference by path: importing kvcompress would need the built extension."""
    folder = ROOT / "kvcompress" / "reference"
    spec = importlib.util.spec_from_file_location(
        "kvcompress_reference", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def structure(name: str, fields: str) -> type[Structure]:
    """A ctypes structure from lines 'type: name name ...' in the order of kvc.h."""
    types = {"pointer": c_void_p, "int64": c_int64, "int": c_int, "float": c_float, "view": View}
    if "table:" in fields:
        types |= {"table": PageTableArgs, "slots": SlotArray * 8}
    pairs = []
    for line in fields.strip().splitlines():
        kind, names = line.split(":")
        pairs += [(name, types[kind.strip()]) for name in names.split()]
    return type(name, (Structure,), {"_fields_": pairs})


class View(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("dtype", c_int),
        ("stride_b", c_int64),
        ("stride_h", c_int64),
        ("stride_t", c_int64),
    )


RopeArgs = structure(
    "RopeArgs",
    """
    view: out x
    pointer: cos sin positions
    int64: B H T D rotary_dim table_rows
    int: inverse""",
)
WindowScoresArgs = structure(
    "WindowScoresArgs",
    """
    pointer: scores
    view: q k
    pointer: lengths scratch
    int64: B Hq Hkv W T D
    float: scale
    int: reduce pool
    int64: kernel_size skip_last mask_first mask_last
    float: softcap
    pointer: sink_logits""",
)
LayerSimilarityArgs = structure(
    "LayerSimilarityArgs",
    """
    pointer: sums
    view: q k
    pointer: scratch
    int64: L Hq Hkv S T D
    float: scale
    int64: sinks recent
    float: softcap""",
)
SelectTopkArgs = structure(
    "SelectTopkArgs",
    """
    pointer: indices scores lengths
    int64: R T k""",
)
# kvc_page_table and kvc_slot_array, and what each call has after them
PageTableArgs = structure(
    "PageTableArgs",
    """
    pointer: block_table lengths page_refs free_pages free_count
    int64: R blocks P pages""",
)
SlotArray = structure(
    "SlotArray",
    """
    pointer: pages tokens
    int64: slot_bytes stride_b stride_h stride_s""",
)
AppendTokensArgs = structure(
    "AppendTokensArgs",
    """
    table: table
    slots: arrays
    pointer: counts scratch
    int64: array_count heads S""",
)
TruncateRowsArgs = structure(
    "TruncateRowsArgs",
    """
    table: table
    pointer: new_lengths""",
)
CompactPagesArgs = structure(
    "CompactPagesArgs",
    """
    table: table
    slots: arrays
    pointer: indices kept scratch
    int64: array_count K""",
)
DecodeArgs = structure(
    "DecodeArgs",
    """
    pointer: out lse
    view: q
    pointer: k_pages v_pages
    int: cache_dtype
    pointer: block_table begin end scratch
    int64: B Hq Hkv S D P pages blocks
    float: scale
    int: causal
    pointer: value_table
    int64: value_pages value_blocks
    pointer: probabilities
    int64: columns sinks
    float: softcap
    pointer: sink_logits""",
)
DecodeSharedArgs = structure(
    "DecodeSharedArgs",
    """
    pointer: out skipped near near_lse far_lse probabilities
    int64: stride_b stride_h columns
    int: dtype cache_dtype
    pointer: v_pages block_table begin end scratch
    int64: B Hq Hkv D P pages blocks
    float: threshold""",
)
MergeStatesArgs = structure(
    "MergeStatesArgs",
    """
    pointer: out lse out_a out_b lse_a lse_b
    int: dtype
    int64: N D""",
)
AttentionArgs = structure(
    "AttentionArgs",
    """
    view: out q k v
    pointer: lse key_bias lengths
    int64: B Hq Hkv S T D window sinks
    float: scale
    int: causal complement
    float: softcap
    pointer: sink_logits""",
)


class AttentionBackwardArgs(Structure):
    _fields_ = (
        ("forward", AttentionArgs),
        *((name, View) for name in ("dout", "dq", "dk", "dv")),
        *((name, c_void_p) for name in ("dlse", "dkey_bias", "scratch", "dsink_logits")),
    )


ARGS = [
    RopeArgs,
    WindowScoresArgs,
    LayerSimilarityArgs,
    SelectTopkArgs,
    DecodeArgs,
    DecodeSharedArgs,
    MergeStatesArgs,
    AttentionArgs,
    AttentionBackwardArgs,
    AppendTokensArgs,
    TruncateRowsArgs,
    CompactPagesArgs,
]


class LaunchError(RuntimeError):
    def __init__(self, name: str, code: int):
        super().__init__(f"{name} returned cudaError {code}")
        self.code = code


def pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def view(x: torch.Tensor) -> View:
    return View(x.data_ptr(), DTYPES.index(x.dtype), *x.stride()[:3])


def page_table(table, page_size: int) -> PageTableArgs:
    """The arrays of ops.PageTable."""
    return PageTableArgs(*(pointer(x) for x in table), *table[0].shape, page_size, table[2].shape[0])


def slot_arrays(arrays, tokens=None):
    out = (SlotArray * 8)()
    for i, array in enumerate(arrays):
        size = array.element_size()
        strides = [0, 0, 0] if tokens is None else [stride * size for stride in tokens[i].stride()[:3]]
        new = None if tokens is None else pointer(tokens[i])
        out[i] = SlotArray(pointer(array), new, array[0, 0].numel() * size, *strides)
    return out


class Kernels:
    def __init__(self, library: Path):
        self.library = ctypes.CDLL(str(library))
        for name in ("window_scores", "layer_similarity", "decode", "decode_shared", "attention_backward"):
            getattr(self.library, f"kvc_cuda_{name}_scratch_bytes").restype = c_int64
        self.check_sizes(ARGS, self.library.check_sizes)

    def check_sizes(self, structures: list[type[Structure]], function) -> None:
        sizes = (c_int64 * len(structures))()
        function(sizes)
        for args, size in zip(structures, sizes, strict=True):
            if ctypes.sizeof(args) != size:
                raise RuntimeError(f"{args.__name__} has not the fields of kvc.h")

    def call(self, name: str, args: Structure) -> None:
        code = getattr(self.library, name)(byref(args), None)
        if code:
            raise LaunchError(name, code)

    def call_with_scratch(self, name: str, args: Structure) -> None:
        nbytes = getattr(self.library, f"{name}_scratch_bytes")(byref(args))
        scratch = torch.full((nbytes + 64,), 255, dtype=torch.uint8)  # NaN wherever nothing is written
        args.scratch = (scratch.data_ptr() + 63) // 64 * 64
        self.call(name, args)

    def rope(self, x, cos, sin, positions=None, *, inverse=False, out=None):
        B, H, T, D = x.shape
        out = torch.empty(B, H, T, D, dtype=x.dtype) if out is None else out
        sizes = (B, H, T, D, 2 * cos.shape[1], cos.shape[0], inverse)
        args = RopeArgs(view(out), view(x), pointer(cos), pointer(sin), pointer(positions), *sizes)
        self.call("kvc_cuda_rope", args)
        return out

    def window_scores(
        self, queries, keys, *, scale=None, reduce="mean", pooling="avg", kernel_size=5, lengths=None, skip_last=None,
        mask_first=0, mask_last=0, softcap=None, sink_logits=None,
    ):  # fmt: skip
        B, Hq, W, D = queries.shape
        Hkv, T = keys.shape[1:3]
        skip_last = W if skip_last is None else skip_last
        scores = torch.full((B, Hkv, max(T - skip_last, 0)), float("nan"))
        scale = D**-0.5 if scale is None else scale
        options = (scale, REDUCTIONS.index(reduce), POOLINGS.index(pooling), kernel_size)
        options += (skip_last, mask_first, mask_last, softcap or 0.0, pointer(sink_logits))
        sizes = (B, Hq, Hkv, W, T, D)
        args = WindowScoresArgs(pointer(scores), view(queries), view(keys), pointer(lengths), None, *sizes, *options)
        self.call_with_scratch("kvc_cuda_window_scores", args)
        return scores

    def layer_similarity(self, queries, keys, *, scale=None, sinks=0, recent=0, softcap=None):
        L, Hq, S, D = queries.shape
        Hkv, T = keys.shape[1:3]
        sums = torch.full((Hq, L, L), float("nan"), dtype=torch.float64)
        scale = D**-0.5 if scale is None else scale
        sizes = (L, Hq, Hkv, S, T, D)
        options = (scale, sinks, recent, softcap or 0.0)
        args = LayerSimilarityArgs(pointer(sums), view(queries), view(keys), None, *sizes, *options)
        self.call_with_scratch("kvc_cuda_layer_similarity", args)
        return sums, max(0, min(S, T - sinks - recent))

    def select_topk(self, scores, k, *, lengths=None):
        R, T = scores.shape
        indices = torch.full((R, k), -7, dtype=torch.int32)
        args = SelectTopkArgs(pointer(indices), pointer(scores), pointer(lengths), R, T, k)
        self.call("kvc_cuda_select_topk", args)
        return indices

    def append_tokens_(self, arrays, tokens, table, counts=None):
        _, H, S = tokens[0].shape[:3]
        scratch = torch.full((table[0].shape[0] + 1,), -77, dtype=torch.int32)
        call = (slot_arrays(arrays, tokens), pointer(counts), pointer(scratch), len(arrays), H, S)
        self.call("kvc_cuda_append_tokens", AppendTokensArgs(page_table(table, arrays[0].shape[1]), *call))

    def truncate_rows_(self, table, new_lengths, page_size):
        args = TruncateRowsArgs(page_table(table, page_size), pointer(new_lengths))
        self.call("kvc_cuda_truncate_rows", args)

    def compact_pages_(self, arrays, table, indices, kept=None):
        scratch = torch.full((table[0].numel() + 1,), -77, dtype=torch.int32)
        call = (slot_arrays(arrays), pointer(indices), pointer(kept), pointer(scratch), len(arrays), indices.shape[1])
        self.call("kvc_cuda_compact_pages", CompactPagesArgs(page_table(table, arrays[0].shape[1]), *call))

    def decode(
        self,
        queries,
        k_pages,
        v_pages,
        end,
        *,
        block_table=None,
        value_table=None,
        begin=None,
        sinks=0,
        scale=None,
        causal=False,
        probabilities=None,
        softcap=None,
        sink_logits=None,
    ):
        B, Hq, S, D = queries.shape
        pages, P, _ = k_pages.shape
        blocks = 1 if block_table is None else block_table.shape[1]
        out = torch.full((B, Hq, S, D), 77.0, dtype=queries.dtype)
        lse = torch.full((B, Hq, S), 77.0)
        args = DecodeArgs(pointer(out), pointer(lse), view(queries), pointer(k_pages), pointer(v_pages))
        args.cache_dtype = DTYPES.index(k_pages.dtype)
        args.block_table, args.begin, args.end = pointer(block_table), pointer(begin), pointer(end)
        args.B, args.Hq, args.Hkv, args.S, args.D = B, Hq, end.shape[0] // B if B else 1, S, D
        args.P, args.pages, args.blocks = P, pages, blocks
        args.scale = D**-0.5 if scale is None else scale
        args.causal = causal
        args.value_table, args.value_pages = pointer(value_table), v_pages.shape[0]
        args.value_blocks = 1 if value_table is None else value_table.shape[1]
        args.probabilities = pointer(probabilities)
        args.columns, args.sinks = 0 if probabilities is None else probabilities.shape[2], sinks
        args.softcap, args.sink_logits = softcap or 0.0, pointer(sink_logits)
        self.call_with_scratch("kvc_cuda_decode", args)
        return out, lse

    def decode_shared(self, near, probabilities, far_lse, v_pages, begin, end, *, block_table, tau=None):
        B, Hq, _, D = near[0].shape
        out, skipped = torch.full_like(near[0], 77.0), torch.full((B, Hq, 1), 77, dtype=torch.uint8)
        args = DecodeSharedArgs(*(pointer(x) for x in (out, skipped, *near, far_lse, probabilities)))
        args.stride_b, args.stride_h, args.columns = *probabilities.stride()[:2], probabilities.shape[2]
        args.dtype, args.cache_dtype = DTYPES.index(out.dtype), DTYPES.index(v_pages.dtype)
        args.v_pages = pointer(v_pages)
        args.block_table = pointer(block_table) or 64  # as the binding: without elements it is not missing
        args.begin, args.end = pointer(begin), pointer(end)
        args.B, args.Hq, args.Hkv, args.D = B, Hq, end.shape[0] // B if B else 1, D
        args.pages, args.P, args.blocks = *v_pages.shape[:2], block_table.shape[1]
        args.threshold = math.inf if tau in (None, 1) else -math.inf if tau == 0 else math.log(tau / (1 - tau))
        self.call_with_scratch("kvc_cuda_decode_shared", args)
        assert not (skipped > 1).any()
        return out, skipped.bool()

    def merge_states(self, a, b, *, out=None):
        (out_a, lse_a), (out_b, lse_b) = a, b
        out = (torch.empty_like(out_a), torch.empty_like(lse_a)) if out is None else out
        dtype, D = DTYPES.index(out_a.dtype), out_a.shape[-1]
        arrays = [pointer(x) for x in (*out, out_a, out_b, lse_a, lse_b)]
        self.call("kvc_cuda_merge_states", MergeStatesArgs(*arrays, dtype, lse_a.numel(), D))
        return out

    def attention(
        self, queries, keys, values, *, causal=True, window=None, sinks=0, complement=False, key_bias=None,
        lengths=None, scale=None, softcap=None, sink_logits=None, grads=None, views=torch.empty_like,
    ):  # fmt: skip
        """(out, lse); with grads = (dout, dlse or None) also (dq, dk, dv, dkey_bias), with sink_logits dsink_logits.
        views makes the output tensors from one of their shape."""
        B, Hq, S, D = queries.shape
        Hkv, T = keys.shape[1:3]
        out, lse = views(queries.contiguous()), torch.full((B, Hq, S), 77.0)
        tensors = [view(x) for x in (out, queries, keys, values)]
        args = AttentionArgs(*tensors, pointer(lse), pointer(key_bias), pointer(lengths), B, Hq, Hkv, S, T, D)
        args.window, args.sinks = 0 if window is None else window, sinks
        args.scale = D**-0.5 if scale is None else scale
        args.causal, args.complement = causal, complement
        args.softcap, args.sink_logits = softcap or 0.0, pointer(sink_logits)
        self.call("kvc_cuda_attention", args)
        if grads is None:
            return out, lse
        dout, dlse = grads
        dq, dk, dv = (views(x.contiguous()) for x in (queries, keys, values))
        dkey_bias = None if key_bias is None else torch.full((B, Hkv, T), 77.0)
        backward = AttentionBackwardArgs(args, *(view(x) for x in (dout, dq, dk, dv)), pointer(dlse))
        backward.dkey_bias = pointer(dkey_bias)
        dsinks = None if sink_logits is None else torch.full((Hq,), 77.0)
        backward.dsink_logits = pointer(dsinks)
        self.call_with_scratch("kvc_cuda_attention_backward", backward)
        return out, lse, dq, dk, dv, dkey_bias, *(() if dsinks is None else (dsinks,))


def int_array(count: int):
    return (c_int32 * count)()


def float_pointer(x: torch.Tensor):
    return ctypes.cast(x.data_ptr(), POINTER(c_float))
