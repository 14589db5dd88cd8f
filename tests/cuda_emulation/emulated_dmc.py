"""The launchers of DMC's kernels, called on CPU tensors like those of emulated.py."""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p
from pathlib import Path

import torch
from emulated import DTYPES, Kernels, View, page_table, pointer, structure, view

PIECE, CHUNK = 256, 64  # KVC_DMC_PIECE, KVC_DMC_CHUNK
IMPORTANCES = ["mean_logit", "mean_sigmoid", "first"]

DecisionsArgs = structure(
    "DecisionsArgs",
    """
    pointer: alpha hard tempered
    view: x
    pointer: noise
    int64: B H T seed offset stream sample token
    float: shift temperature scale margin
    int: drawn only_hard""",
)
ImportanceArgs = structure(
    "ImportanceArgs",
    """
    pointer: omega
    view: x
    int64: B Hq Hkv T
    float: shift eps
    int: reduce""",
)
MaskArgs = structure(
    "MaskArgs",
    """
    pointer: bias tempered
    int64: B H T""",
)
AccumulateArgs = structure(
    "AccumulateArgs",
    """
    view: out_k out_v k v
    pointer: z states alpha omega initial_k initial_v initial_z scratch
    int64: B Hkv T D neuron window""",
)


class AccumulateBackwardArgs(Structure):
    _fields_ = (
        ("forward", AccumulateArgs),
        *((name, View) for name in ("dout_k", "dout_v", "dk", "dv")),
        *((name, c_void_p) for name in ("dalpha", "domega", "scratch")),
    )


AppendArgs = structure(
    "AppendArgs",
    """
    table: table
    pointer: k_pages v_pages
    view: k v
    pointer: tail_k tail_v tail_w tail_counts alpha omega cos sin positions counts scratch
    int64: B Hkv S D rotary_dim table_rows neuron window""",
)
ARGS = [DecisionsArgs, ImportanceArgs, MaskArgs, AccumulateArgs, AccumulateBackwardArgs, AppendArgs]


def gates(x: torch.Tensor) -> View:
    """[B, H, T] as a view with D = 1."""
    return View(x.data_ptr(), DTYPES.index(x.dtype), *x.stride())


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def place_of(neuron: int | None, D: int) -> int:
    return -1 if neuron is None else neuron % D


class DmcKernels(Kernels):
    def __init__(self, library: Path):
        super().__init__(library)
        for name in ("dmc_accumulate", "dmc_accumulate_backward"):
            getattr(self.library, f"kvc_cuda_{name}_scratch_bytes").restype = c_int64
        self.check_sizes(ARGS, self.library.check_dmc_sizes)

    def dmc_decisions(
        self, logits, *, shift=5.0, temperature=0.1, scale=1.0, margin=0.0, noise=None, hard=False
    ):  # fmt: skip
        found = [nans(*logits.shape) for _ in range(3)]
        given = noise if isinstance(noise, torch.Tensor) else None
        drawn = given is None and noise is not None
        numbers = tuple(noise) if drawn else (0,) * 5
        args = DecisionsArgs(*(pointer(x) for x in found), gates(logits), pointer(given), *logits.shape, *numbers)
        args.shift, args.temperature, args.scale, args.margin = shift, temperature, scale, margin
        args.drawn, args.only_hard = drawn, hard
        self.call("kvc_cuda_dmc_decisions", args)
        return tuple(found)

    def dmc_importance(self, logits, kv_heads, *, shift=5.0, eps=0.0, reduce="mean_logit"):
        B, Hq, T = logits.shape
        omega = nans(B, kv_heads, T)
        settings = (B, Hq, kv_heads, T, shift, eps, IMPORTANCES.index(reduce))
        self.call("kvc_cuda_dmc_importance", ImportanceArgs(pointer(omega), gates(logits), *settings))
        return omega

    def dmc_mask(self, tempered):
        bias = nans(*tempered.shape)
        args = MaskArgs(pointer(bias), pointer(tempered), *tempered.shape)
        self.call("kvc_cuda_dmc_mask", args)
        return bias

    def dmc_accumulate(
        self, keys, values, alpha, omega, *, neuron=None, window=None, initial=None, grads=None,
        views=torch.empty_like,
    ):  # fmt: skip
        """Averages and z; with grads, those of the averages, also the gradients of keys, values, alpha and omega. views
        makes the output tensors from one of their shape."""
        B, H, T, D = keys.shape
        out_k, out_v = (views(x.contiguous()) for x in (keys, values))
        chunks = 0 if window is not None and window < T else -(-T // CHUNK)
        z, states = nans(B, H, T), nans(B, H, chunks, 2, D)
        args = AccumulateArgs(*(view(x) for x in (out_k, out_v, keys, values)), pointer(z), pointer(states))
        args.alpha, args.omega = pointer(alpha), pointer(omega)
        if initial is not None:
            args.initial_k, args.initial_v, args.initial_z = (pointer(x) for x in initial)
        args.B, args.Hkv, args.T, args.D = B, H, T, D
        args.neuron, args.window = place_of(neuron, D), window or 0
        self.call_with_scratch("kvc_cuda_dmc_accumulate", args)
        if grads is None:
            return out_k, out_v, z
        dk, dv = (views(x.contiguous()) for x in (keys, values))
        dalpha, domega = nans(B, H, T), nans(B, H, T)
        backward = AccumulateBackwardArgs(args, *(view(x) for x in (*grads, dk, dv)), pointer(dalpha), pointer(domega))
        self.call_with_scratch("kvc_cuda_dmc_accumulate_backward", backward)
        return out_k, out_v, z, dk, dv, dalpha, domega

    def dmc_append_(
        self, k_pages, v_pages, table, tail, keys, values, alpha, omega, *, cos=None, sin=None, positions=None,
        counts=None, neuron=None, window=None,
    ):  # fmt: skip
        B, H, S, D = keys.shape
        scratch = torch.full((B * H * (3 + -(-S // PIECE)) + 1,), -77, dtype=torch.int32)
        arrays = (*tail, alpha, omega, cos, sin, positions, counts, scratch)
        args = AppendArgs(page_table(table, k_pages.shape[1]), pointer(k_pages), pointer(v_pages), view(keys))
        args.v = view(values)
        for (name, _), array in zip(AppendArgs._fields_[5:16], arrays, strict=True):
            setattr(args, name, pointer(array))
        args.B, args.Hkv, args.S, args.D = B, H, S, D
        if cos is not None:
            args.rotary_dim, args.table_rows = 2 * cos.shape[1], cos.shape[0]
        args.neuron, args.window = place_of(neuron, D), window or 0
        self.call("kvc_cuda_dmc_append", args)
