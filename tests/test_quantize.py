"""Codes and scales: quantize, and what reads and writes rows of them."""

import math

import accuracy
import oracle
import pytest
import torch
from accuracy import assert_within
from backends import BACKENDS, TABLES
from helpers import DTYPES, check_table, covering, others_of, paged, rows_of
from oracle.quantize import turned
from test_steps import clones, random_table, rotation

from kvcompress import ops

NAN, INF = float("nan"), float("inf")
FORMATS = {"int8": ("int8", "int8"), "k8v4": ("int8", "int4")}  # of keys and values
LEVELS = {"int8": 127, "int4": 7}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def same(x, y):
    assert x.dtype == y.dtype
    torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


# ---- vectors ----


@pytest.mark.parametrize(
    ("format", "dtype", "D", "backend"),
    covering(("int8", "int4"), DTYPES, (2, 16, 64, 80, 96, 250, 256, 512), BACKENDS),
    indirect=["backend"],
)
def test_codes_as_the_reference(backend, format, dtype, D):
    x = (torch.randn(2, 3, 5, D) * torch.logspace(-9, 4, 5)[:, None]).to(dtype).clamp(-6e4, 6e4)
    codes, scales = ops.quantize(x, format)
    for found, expected in zip((codes, scales), oracle.quantize(x, format), strict=True):
        same(found, expected)
    for kind in DTYPES:
        back = ops.dequantize(codes, scales, format, kind)
        same(back, oracle.dequantize(codes, scales, format, kind))
    # no number is further off than half a step, where it is rounded
    off = oracle.dequantize(codes, scales, format, torch.float64) - x.double()
    slack = 2.0**-20 * x.double().abs().amax(-1, keepdim=True)
    off = turned(off) if format == "int4" else off
    assert (off.abs() <= scales.double()[..., None] / 2 * (1 + 2.0**-20) + slack).all()


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_any_strides_and_dimensions(backend, format):
    x = torch.randn(2, 5, 3, 24)
    expected = ops.quantize(x, format)
    for y in (x.transpose(1, 2).contiguous().transpose(1, 2), torch.randn(2, 5, 3, 40)[..., 8:32].copy_(x)):
        for found, wanted in zip(ops.quantize(y, format), expected, strict=True):
            assert torch.equal(found, wanted)
    for shape in ((24,), (3, 24), (5, 3, 24), (1, 2, 5, 3, 24)):
        part = x.flatten()[: math.prod(shape)].view(shape)
        codes, scales = ops.quantize(part, format)
        assert codes.shape[:-1] == scales.shape == shape[:-1]
        assert torch.equal(codes.flatten(), expected[0].flatten()[: codes.numel()])
        assert ops.dequantize(codes, scales, format).shape == shape
    codes, scales = ops.quantize(x[:0], format)
    assert codes.shape[0] == 0 and ops.dequantize(codes, scales, format).shape == (0, 5, 3, 24)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_vectors_out_of_the_ordinary(backend, format):
    levels = LEVELS[format]
    x = torch.zeros(9, 16)  # of which turning is exact
    x[1, 3], x[2, 3], x[3, 3] = NAN, INF, -INF
    x[4, 3], x[5, 3] = 65504.0 * levels, 65520.0 * levels  # the largest scale there is, and none
    x[6, :2] = torch.tensor([2.0**-147, -(2.0**-147)])  # the least scale, codes 0
    x[7, :2] = torch.tensor([2.0**-24 * levels, -(2.0**-24)])
    x[8, :2] = torch.tensor([-1.0, 1.0])
    x = turned(x) if format == "int4" else x
    codes, scales = ops.quantize(x, format)
    for found, expected in zip((codes, scales), oracle.quantize(x, format), strict=True):
        same(found, expected)
    assert scales.isnan().tolist() == [False, True, True, True, False, True, False, False, False]
    assert scales[0] == 0 and scales[4] == 65504.0 and scales[6] == scales[7] == 2.0**-24
    back = ops.dequantize(codes, scales, format)
    back = turned(back) if format == "int4" else back
    assert (back[8, :2] / scales[8]).tolist() == [-levels, levels]
    assert back[1].isnan().all() and not back[0].any() and back[4, 3] == 65504.0 * levels and not back[6].any()


def test_every_code_of_four_bits_comes_back(backend):
    x = torch.arange(-7.0, 8.0)[:, None].expand(15, 48).clone()
    x[:, 0] = 7.0  # a scale of 1
    x = turned(x)  # in blocks of 16, which is exact
    codes, scales = ops.quantize(x, "int4")
    assert codes.dtype == torch.uint8 and (scales == 1).all()
    assert torch.equal(ops.dequantize(codes, scales, "int4"), x)
    assert (codes[:, 1] & 15).tolist() == [v % 16 for v in range(-7, 8)]  # element 1 low, element 25 high
    assert (codes[:, 1] >> 4).tolist() == [v % 16 for v in range(-7, 8)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.quantize(torch.randn(2, 8), "int2"), "format must be one of int8, int4, got 'int2'"),
        (lambda: ops.quantize(torch.randn(2, 7), "int4"), "x must have an even last dimension for int4, got 7"),
        (lambda: ops.quantize(torch.randn(2, 513), "int8"), "x must have a last dimension between 1 and 512, got 513"),
        (lambda: ops.quantize(torch.ones(2, 8, dtype=torch.int8), "int8"), "x must be float32.* got torch.int8"),
        (lambda: ops.dequantize(torch.ones(2, 8), torch.ones(2).half(), "int8"), "codes must be torch.int8 for int8"),
        (lambda: ops.dequantize(torch.ones(2, 8).char(), torch.ones(2), "int8"), r"scales must be float16 \(2,\)"),
        (
            lambda: ops.dequantize(torch.ones(2, 8).char(), torch.ones(2).half(), "int8", torch.float64),
            "dtype must be float32, bfloat16 or float16, got torch.float64",
        ),
    ],
)
def test_wrong_vectors_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_opcheck_and_gradients():
    x = torch.randn(2, 3, 4, 8)
    for bits, format in ((8, "int8"), (4, "int4")):
        torch.library.opcheck(torch.ops.kvcompress.quantize, (x, bits))
        codes, scales = ops.quantize(x.flatten(0, 2), format)
        torch.library.opcheck(torch.ops.kvcompress.dequantize, (codes, scales, bits, torch.bfloat16))
    with pytest.raises(NotImplementedError, match="quantize has no gradient"):
        ops.quantize(x.requires_grad_(), "int8")[1].sum().backward()


# ---- attention ----


class Stored:
    """Pages of keys and values as codes; `plain`: what they stand for, in float64."""

    def __init__(self, k_pages, v_pages, format):
        self.codes, self.scales, self.plain = [], [], []
        for x, kind in zip((k_pages, v_pages), FORMATS[format], strict=True):
            codes, scales = ops.quantize(x, kind)
            self.codes.append(codes)
            self.scales.append(scales)
            self.plain.append(oracle.dequantize(codes, scales, kind, torch.float64))
        self.levels = LEVELS[FORMATS[format][1]]
        self.options = {"key_scales": self.scales[0], "value_scales": self.scales[1]}


def integer_errors(queries, softmax, values, stored, few):
    """What the integers of `few` queries add to the errors of out and of logits, and on tensor cores weights of 8 bits;
    kvc.h has the bounds."""
    if accuracy.on_cuda and queries.dtype != torch.float32:
        v = values.double().repeat_interleave(softmax.p.shape[1] // softmax.heads, 1)
        if stored.levels != 7:
            return 2.0**-8 * (softmax.p @ v.abs()), 0.0
        block = v.shape[-1] & -v.shape[-1]
        lost = 2.0**-8 * (softmax.p @ turned(v).abs()).unflatten(-1, (-1, block))
        return (lost.sum(-1, keepdim=True) / block**0.5).expand_as(lost).flatten(-2), 0.0  # turned back
    if accuracy.on_cuda or not few:
        return 0.0, 0.0
    size = queries.double().abs().amax(-1, keepdim=True) / 65534
    logits = abs(softmax.scale) * size * softmax.keys.abs().sum(-1)[:, :, None]
    most = torch.where(softmax.p > 0, logits, 0).amax(-1, keepdim=True)
    v = values.double().repeat_interleave(softmax.p.shape[1] // softmax.heads, 1)
    # a scale reaches its vector's largest element, nearly: the next float16 and half a step are above it
    root = (v.shape[-1] & -v.shape[-1]) ** 0.5 if stored.levels == 7 else 1.0
    v = turned(v) if stored.levels == 7 else v
    steps = v.abs().amax(-1)[:, :, None] * (1 + 2.0**-10) / stored.levels * (1 + 1 / (2 * stored.levels - 1))
    weights = (softmax.p * steps * softmax.p.exp().clamp(max=1.001)).amax(-1, keepdim=True)
    count = softmax.count[..., None].double()
    lost = count * weights * (1 + 2 * most) * stored.levels / 65534
    return (torch.expm1(2 * most) * (softmax.p @ v.abs()) + lost) * root, most[..., 0]  # turned back


def check(queries, k_pages, v_pages, end, format, **options):
    stored = Stored(k_pages, v_pages, format)
    found = ops.decode(queries, *stored.codes, end, **stored.options, **options)
    exact = oracle.decode(queries.double(), *stored.plain, end, **options)
    softmax, values = accuracy.of_pages(queries, *stored.plain, end, **options)
    few = queries.shape[1] * queries.shape[2] * queries.shape[0] <= 8 * len(end)
    out, lse = integer_errors(queries, softmax, values, stored, few)
    assert found[0].dtype == queries.dtype
    assert_within(found[0], exact[0], softmax.out_error(values, queries.dtype) + out, "out")
    assert_within(found[1], exact[1], softmax.lse_error() + lse, "lse")
    return found


SIZES = [  # B, Hq, Hkv, S, T, D, P
    (1, 1, 1, 1, 1, 16, 4), (2, 8, 2, 1, 300, 64, 64), (1, 8, 1, 3, 70, 128, 16), (2, 3, 3, 2, 33, 80, 8),
    (1, 4, 2, 3, 300, 34, 256), (1, 9, 1, 1, 700, 256, 32), (1, 5, 1, 1, 40, 6, 1), (1, 2, 1, 20, 130, 96, 16),
    (1, 7, 1, 1, 140, 512, 16), (2, 6, 1, 1, 600, 128, 64),
    (1, 4, 1, 2, 9000, 32, 64),  # pieces that are longer, as there are many
]  # fmt: skip


@pytest.mark.parametrize(
    ("format", "dtype", "sizes", "backend"), covering(FORMATS, DTYPES, SIZES, BACKENDS), indirect=["backend"]
)
def test_rows_of_codes_as_the_reference(backend, format, dtype, sizes):
    B, Hq, Hkv, S, T, D, P = sizes
    R = B * Hkv
    queries = torch.randn(B, Hq, S, D).to(dtype)
    k_pages, v_pages, table = paged(torch.randn(R, T, D), torch.randn(R, T, D), P)  # free slots get scales of NaN
    end = torch.randint(1, T + 1, (R,), dtype=torch.int32)
    end[0] = T
    for causal in (False, True):
        check(queries, k_pages, v_pages, end, format, block_table=table, causal=causal)


@pytest.mark.parametrize(
    ("format", "dtype", "sizes", "sinks", "softcap", "sunk", "backend"),
    covering(FORMATS, DTYPES, [(4, 1), (4, 5), (10, 2)], [0, 37, 600], [None, 3.0], [False, True], BACKENDS),
    indirect=["backend"],
)
def test_ranges_sinks_and_values_elsewhere(backend, format, dtype, sizes, sinks, softcap, sunk):
    Hq, S = sizes
    queries, (k, v) = torch.randn(2, Hq, S, 32).to(dtype), torch.randn(2, 4, 730, 32)
    begin, end = int32(0, 10, 700, 720), int32(20, 30, 730, 720)
    k_pages, v_pages, table = paged(k, v, 16)
    _, others, other = paged(k, v, 16, seed=1)
    others = torch.cat([others, others[:2]])  # another number of pages
    settings = {"begin": begin, "block_table": table, "sinks": sinks, "softcap": softcap, "scale": 0.4}
    settings["sink_logits"] = torch.randn(Hq) if sunk else None
    there = check(queries, k_pages, v_pages, end, format, causal=True, **settings)
    here = check(queries, k_pages, others, end, format, causal=True, value_table=other, **settings)
    assert torch.equal(here[0], there[0]) and torch.equal(here[1], there[1])


@pytest.mark.parametrize(
    ("format", "dtype", "Hq", "D", "backend"),
    covering(FORMATS, DTYPES, [2, 12], [34, 64, 128, 256, 320], BACKENDS),
    indirect=["backend"],
)
def test_probabilities_of_codes(backend, format, dtype, Hq, D):
    queries, (k, v) = torch.randn(2, Hq, 1, D).to(dtype), torch.randn(2, 4, 700, D)
    begin, end = int32(0, 30, 699, 5), int32(700, 60, 699, 600)
    k_pages, v_pages, table = paged(k, v, 16)
    stored, found, exact = (
        Stored(k_pages, v_pages, format),
        torch.full((2, Hq, 700), 7.0),
        torch.full((2, Hq, 700), 7.0),
    )
    options = {"begin": begin, "block_table": table}
    out = ops.decode(queries, *stored.codes, end, probabilities=found, **stored.options, **options)
    wanted = oracle.decode(queries.double(), *stored.plain, end, probabilities=exact, **options)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-7)
    off = 2e-3 if dtype == torch.float32 else 2**-7  # of weights on tensor cores, and of the result
    torch.testing.assert_close(out[0].double(), wanted[0], rtol=0, atol=off * float(v.abs().max()))


@pytest.mark.parametrize("format", FORMATS)
def test_integers_cost_little_beside_codes(cpu, format):
    """Over many rows, one of whose keys outweighs the others: far less than the codes themselves."""
    queries, (k, v) = torch.randn(4, 8, 1, 128), torch.randn(2, 8, 2000, 128)
    k[:, 5] = 3 * queries[:, ::4].reshape(8, 128) / 11  # some 3/4 of the weight, in a piece with 511 others
    end = torch.full((8,), 2000, dtype=torch.int32)
    stored = Stored(k, v, format)
    found, _ = ops.decode(queries, *stored.codes, end, **stored.options)
    exact, _ = oracle.decode(queries.double(), *stored.plain, end)
    whole, _ = oracle.decode(queries.double(), k.double(), v.double(), end)
    ours, codes = ((x - y).square().mean().sqrt() for x, y in ((found, exact), (exact, whole)))
    assert ours < 2e-4 * exact.square().mean().sqrt()
    assert ours < 0.05 * codes


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("heads", [2, 12])  # integers, and lanes
def test_what_is_not_finite_reaches_the_queries_that_see_it(backend, format, heads):
    queries, k, v = torch.randn(1, heads, 2, 16), torch.randn(1, 9, 16), torch.randn(1, 9, 16)
    for x in (k, v):
        kept = x[0, 8].clone()
        x[0, 8, 3] = INF
        stored = Stored(k, v, format)
        out, lse = ops.decode(queries, *stored.codes, int32(9), causal=True, **stored.options)
        assert out[:, :, 0].isfinite().all() and lse[:, :, 0].isfinite().all()
        assert out[:, :, 1].isnan().all() and lse[:, :, 1].isnan().all() == (x is k)
        x[0, 8] = kept
    queries[0, 0, 0, 5] = NAN
    stored = Stored(k, v, format)
    out, _ = ops.decode(queries, *stored.codes, int32(9), causal=True, **stored.options)
    assert out[0, 0, 0].isnan().all() and out[0, 0, 1].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_empty_rows(backend, format):
    queries, k, v = torch.randn(1, 4, 1, 32), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    found = check(queries, k, v, int32(0, 9), format)
    assert not found[0][:, :2].any() and (found[1][:, :2] == -INF).all()
    stored = Stored(0 * k, v, format)  # every key weighs as much
    out, lse = ops.decode(queries, *stored.codes, int32(4, 9), **stored.options)
    torch.testing.assert_close(lse, torch.tensor([4.0, 4.0, 9.0, 9.0]).log().view(1, 4, 1))
    zeros = Stored(k, 0 * v, format)
    assert not ops.decode(queries, *zeros.codes, int32(4, 9), **zeros.options)[0].any()
    check(0 * queries, k, v, int32(4, 9), format)


@pytest.mark.parametrize("format", FORMATS)
def test_bits_of_a_query_depend_on_its_own_row_only(backend, format):
    queries, (k, v) = torch.randn(3, 4, 1, 64), torch.randn(2, 6, 700, 64)
    end, stored = int32(700, 5, 300, 256, 257, 0), Stored(k, v, format)
    out, lse = ops.decode(queries, *stored.codes, end, **stored.options)
    for b in range(3):
        rows = slice(2 * b, 2 * b + 2)
        scales = {name: x[rows] for name, x in stored.options.items()}
        alone = ops.decode(queries[b : b + 1], *(x[rows] for x in stored.codes), end[rows], **scales)
        assert torch.equal(alone[0], out[b : b + 1]) and torch.equal(alone[1], lse[b : b + 1])
    k_pages, v_pages, table = paged(k, v, 16)
    there = Stored(k_pages, v_pages, format)
    found = ops.decode(queries, *there.codes, end, block_table=table, **there.options)
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)


def test_tables_agree_on_codes():
    """Logits are made of the same integers: lse differs by the roundings of an exponential alone."""
    queries, (k, v) = torch.randn(2, 8, 1, 80), torch.randn(2, 4, 700, 80)
    end, start, found = int32(700, 300, 17, 1), ops.simd(), []
    for format in FORMATS:
        try:
            for name in TABLES:
                ops.simd(name)
                stored = Stored(k, v, format)
                found.append(ops.decode(queries, *stored.codes, end, **stored.options))
        finally:
            ops.simd(start)
        for out, lse in found[1:]:
            torch.testing.assert_close(out, found[0][0], rtol=0, atol=1e-4)
            torch.testing.assert_close(lse, found[0][1], rtol=0, atol=1e-6)
        found.clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_scales": None}, r"key_scales must be torch.float16 \(6, 4\), got None"),
        (
            {"value_scales": torch.ones(6, 4)},
            r"value_scales must be torch.float16 \(6, 4\), got torch.float32 \(6, 4\)",
        ),
        ({"key_scales": torch.ones(6, 8).half()[:, ::2]}, "key_scales must be contiguous"),
        ({"k_pages": torch.randn(6, 4, 16)}, "k_pages must be int8 where there are scales, got torch.float32"),
        ({"v_pages": torch.randn(6, 4, 16)}, r"v_pages must be torch.int8 or torch.uint8 \(6, 4, 16\), got"),
        ({"v_pages": torch.ones(6, 4, 9).byte()}, r"v_pages must be .* \(6, 4, 8\), got torch.uint8 \(6, 4, 9\)"),
        ({"key_scales": None, "value_scales": None}, "k_pages must be float32, bfloat16 or float16, got torch.int8"),
    ],
)
def test_wrong_pages_are_named(change, message):
    arguments = {
        "queries": torch.randn(1, 4, 1, 16), "k_pages": torch.ones(6, 4, 16).char(),
        "v_pages": torch.ones(6, 4, 16).char(), "end": int32(5, 7), "key_scales": torch.ones(6, 4).half(),
        "value_scales": torch.ones(6, 4).half(), "block_table": torch.arange(4, dtype=torch.int32).reshape(2, 2),
        **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        ops.decode(**arguments)


def test_opcheck_of_rows():
    stored = Stored(torch.randn(6, 4, 16), torch.randn(6, 4, 16), "k8v4")
    table = torch.arange(4, dtype=torch.int32).reshape(2, 2)
    arguments = (torch.randn(1, 4, 2, 16), *stored.codes, table, None, None, int32(5, 7), 0.25, True, 1, None, 0.0)
    torch.library.opcheck(torch.ops.kvcompress.decode, (*arguments, *stored.scales))


# ---- steps ----


def in_turn(queries, keys, values, codes, scales, table, format, *, shift=None, begin=None, cos=None, sin=None, **rest):
    """What paged_step_ is, by the ops of its parts."""
    B, _, S, _ = queries.shape
    first = table.lengths if shift is None else table.lengths + shift
    positions = (first.view(B, -1)[:, :1] + torch.arange(S, dtype=torch.int32)).contiguous()
    if cos is not None:
        queries, keys = (ops.rope(x, cos, sin, positions) for x in (queries, keys))
    new = [ops.quantize(x, kind) for x, kind in zip((keys, values), FORMATS[format], strict=True)]
    ops.append_tokens_([*codes, *scales], [x[0] for x in new] + [x[1] for x in new], table)
    named = {"key_scales": scales[0], "value_scales": scales[1]}
    return ops.decode(
        queries, *codes, table.lengths, block_table=table.block_table, begin=begin, causal=True, **named, **rest
    )


STEPS = [  # B, Hq, Hkv, S, D, rotary_dim, page_size
    (1, 4, 2, 1, 16, 16, 4), (2, 2, 2, 3, 34, 8, 1), (2, 6, 2, 5, 80, 0, 16), (1, 32, 8, 1, 128, 128, 64),
    (3, 18, 2, 2, 40, 40, 8), (1, 2, 1, 1, 512, 128, 4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("format", "dtype", "shape", "backend"), covering(FORMATS, DTYPES, STEPS, BACKENDS), indirect=["backend"]
)
def test_a_step_over_codes_is_its_parts_in_turn(backend, format, dtype, shape):
    B, Hq, Hkv, S, D, rotary_dim, P = shape
    for seed in range(2):
        torch.manual_seed(seed)
        table = random_table(seed, B * Hkv, P, S)
        others = others_of(table, P)
        stored = Stored(torch.randn(len(table.refs), P, D), torch.randn(len(table.refs), P, D), format)
        q = torch.randn(B, S, Hq, D).to(torch.float32 if seed else dtype).transpose(1, 2)
        k, v = (torch.randn(B, S, Hkv, D).to(dtype).transpose(1, 2) for _ in range(2))
        options = rotation(90, rotary_dim)
        if seed:
            options |= {"begin": (table.lengths * 0.4).to(torch.int32), "softcap": 5.0, "sink_logits": torch.randn(Hq)}
        ours, theirs = (clones((stored.codes, stored.scales, table)) for _ in range(2))
        scales = {"key_scales": ours[1][0], "value_scales": ours[1][1]}
        out = ops.paged_step_(q, k, v, *ours[0], ours[2], **scales, **options)
        bits = in_turn(q, k, v, *theirs, format, **options)
        assert all(torch.equal(x, y) for x, y in zip(out, bits, strict=True))
        for x, y in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
            for row, other in zip(rows_of(x, ours[2]), rows_of(y, theirs[2]), strict=True):
                assert torch.equal(row, other)
        check_table(ours[2], P, others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_scales": None}, "key_scales must be torch.float16 .* got None"),
        ({"value_scales": torch.ones(4, 3).half()}, "value_scales must be torch.float16"),
        ({"keys": torch.randn(1, 2, 1, 4).half()}, "values must be torch.float16"),
        ({"keys": torch.ones(1, 2, 1, 4).char()}, "keys must be float32, bfloat16 or float16, got torch.int8"),
        ({"k_pages": torch.randn(4, 4, 4)}, "k_pages must be int8 where there are scales"),
    ],
)
def test_wrong_arguments_of_a_step_are_named_and_change_nothing(change, message):
    table = ops.PageTable(int32(0, 1).view(2, 1), int32(2, 3), int32(1, 1, 0, 0), int32(2, 3, 0, 0), int32(2, 0))
    arguments = {
        "queries": torch.randn(1, 4, 1, 4), "keys": torch.randn(1, 2, 1, 4), "values": torch.randn(1, 2, 1, 4),
        "k_pages": torch.ones(4, 4, 4).char(), "v_pages": torch.ones(4, 4, 2).byte(), "table": table,
        "key_scales": torch.ones(4, 4).half(), "value_scales": torch.ones(4, 4).half(), **change,
    }  # fmt: skip
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    lengths = table.lengths.clone()
    with pytest.raises(ValueError, match=message):
        ops.paged_step_(**arguments)
    assert all(torch.equal(arguments[name], x) for name, x in before.items()) and torch.equal(table.lengths, lengths)
