"""csrc/cuda/attention.cu and attention_backward.cu in the emulation, against kvcompress.reference."""

import emulated
import pytest
import torch
from helpers import DTYPES, assert_as_accurate

INF = float("inf")
MASKS = {
    "all": {"causal": False},
    "causal": {},
    "window": {"window": 20},
    "sinks": {"window": 20, "sinks": 3},
    "complement": {"window": 20, "sinks": 3, "complement": True},
}


def by_autograd(reference, queries, keys, values, dout, dlse, key_bias, sink_logits, options):
    """out, lse and the gradients of queries, keys, values, bias and sinks."""
    leaves = [x.clone().requires_grad_() for x in (queries, keys, values)]
    bias = None if key_bias is None else key_bias.clone().requires_grad_()
    sinks = None if sink_logits is None else sink_logits.clone().requires_grad_()
    out, lse = reference.attention(*leaves, key_bias=bias, sink_logits=sinks, **options)
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse == -INF, 0) * dlse).sum()  # -inf has no gradient
    loss.backward()
    return out.detach(), lse.detach(), *(None if x is None else x.grad for x in (*leaves, bias, sinks))


def by_formula(reference, queries, keys, values, dout, dlse, key_bias, sink_logits, options):
    """The same by the formula of kvc_attention_backward: probabilities from lse in float32, as a kernel has them."""
    out, lse = reference.attention(queries, keys, values, key_bias=key_bias, sink_logits=sink_logits, **options)
    mask, cap = {name: x for name, x in options.items() if name != "softcap"}, options.get("softcap")
    (S, D), (Hkv, T), dtype = queries.shape[2:], keys.shape[1:3], queries.dtype
    k, v = (x.repeat_interleave(queries.shape[1] // Hkv, 1) for x in (keys, values))
    scale, lengths = D**-0.5, options.get("lengths")
    ends = torch.tensor([T]) if lengths is None else lengths.long()
    own = torch.arange(T) == ends[:, None, None] - S + torch.arange(S)[:, None]
    seen = reference.visible(S, T, **mask)[:, None] & (lse[..., None] > -INF)
    x, slope = (queries @ k.mT).float() * scale, 1.0
    if cap is not None:
        slope = 1 - torch.tanh(x / cap) ** 2
        x = cap * torch.tanh(x / cap)
    if key_bias is not None:
        bias = key_bias.repeat_interleave(queries.shape[1] // Hkv, 1)[:, :, None]
        x = x + torch.where(own[:, None], 0, bias.float())
    p = torch.exp(x - lse.float()[..., None]).masked_fill(~seen, 0)
    delta = (dout.float() * out.float()).sum(-1) - (0 if dlse is None else dlse.float())
    ds = (p * ((dout @ v.mT).float() - delta[..., None])).masked_fill(~seen, 0)

    def of_kv_heads(x):
        return x.unflatten(1, (Hkv, -1)).sum(2)

    dl = (ds * slope).to(dtype)
    dk, dv = dl.mT @ queries * scale, p.to(dtype).mT @ dout
    dbias = None if key_bias is None else of_kv_heads(ds.masked_fill(own[:, None], 0).sum(2))
    dsinks = None
    if sink_logits is not None:
        of_sink = torch.exp(sink_logits[:, None] - lse.float()).masked_fill(lse == -INF, 0)
        dsinks = -(of_sink * delta).sum((0, 2))
    return out, lse, dl @ k * scale, of_kv_heads(dk), of_kv_heads(dv), dbias, dsinks


def check(kernels, reference, queries, keys, values, *, key_bias=None, sink_logits=None, dlse=True, **options):
    dout = torch.randn(*queries.shape).to(queries.dtype)
    dlse = torch.randn(*queries.shape[:3]) if dlse else None
    given = {"key_bias": key_bias, "sink_logits": sink_logits}
    ours = kernels.attention(queries, keys, values, **given, grads=(dout, dlse), **options)
    tensors = (queries, keys, values, dout, dlse, key_bias, sink_logits)
    exact = by_autograd(reference, *(None if x is None else x.double() for x in tensors), options)
    plain = by_formula(reference, *tensors, options)
    names = ("out", "lse", "dq", "dk", "dv", "dkey_bias", "dsinks")
    for name, x, y, z in zip(names, ours, plain, exact, strict=False):
        if z is None:
            continue
        if name == "dsinks":  # a few sums of many terms
            torch.testing.assert_close(x.double(), z, atol=200 * torch.finfo(queries.dtype).eps, rtol=1e-3)
            continue
        try:
            assert_as_accurate(x, y.to(x.dtype), z)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    return ours


def random_inputs(B, Hq, Hkv, S, T, D, dtype=torch.float32):
    return torch.randn(B, Hq, S, D).to(dtype), *(torch.randn(B, Hkv, T, D).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_as_the_reference(kernels, reference, dtype, mask):
    inputs = random_inputs(1, 2, 1, 70, 130, 16, dtype)
    bias = torch.randn(1, 1, 130)
    check(kernels, reference, *inputs, key_bias=bias, **MASKS[mask])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "S", "T", "D"),
    [(1, 1, 1, 1, 2, 16), (2, 4, 2, 3, 35, 64), (1, 3, 3, 33, 33, 80), (1, 2, 1, 65, 66, 128), (1, 6, 2, 17, 40, 33),
     (1, 1, 1, 20, 70, 256), (1, 2, 2, 5, 9, 7), (1, 1, 1, 40, 40, 136), (1, 1, 1, 9, 70, 200)],
)  # fmt: skip
def test_odd_sizes_as_the_reference(kernels, reference, dtype, B, Hq, Hkv, S, T, D):
    check(kernels, reference, *random_inputs(B, Hq, Hkv, S, T, D, dtype))
    if D < 100:
        check(kernels, reference, *random_inputs(B, Hq, Hkv, S, T, D, dtype), dlse=False, causal=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("D", [16, 300])
def test_softcap_and_sinks_as_the_reference(kernels, reference, dtype, mask, D):
    inputs, lengths = random_inputs(2, 2, 1, 40, 70, D, dtype), torch.tensor([70, 25], dtype=torch.int32)
    options = {"lengths": lengths, **MASKS[mask]}
    check(kernels, reference, *inputs, key_bias=torch.randn(2, 1, 70), softcap=1.5, **options)
    check(kernels, reference, *inputs, sink_logits=torch.tensor([1.5, -INF]), **options)
    ours = check(kernels, reference, *inputs, sink_logits=torch.tensor([1.5, -2.0]), softcap=30.0, **options)
    assert (ours[1][1, :, :15] == -INF).all() and not ours[0][1, :, :15].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "S", "T", "D"),
    [(1, 2, 1, 17, 33, 512), (2, 2, 2, 3, 40, 400), (1, 3, 1, 33, 34, 257), (1, 1, 1, 2, 5, 509)],
)
def test_head_dims_above_256_as_the_reference(kernels, reference, dtype, B, Hq, Hkv, S, T, D):
    inputs = random_inputs(B, Hq, Hkv, S, T, D, dtype)
    check(kernels, reference, *inputs, key_bias=torch.randn(B, Hkv, T))
    check(kernels, reference, *inputs, dlse=False, causal=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_with_less_shared_memory(kernels, reference, monkeypatch, dtype):
    inputs = random_inputs(1, 2, 1, 20, 40, 256, dtype)
    monkeypatch.setenv("KVC_EMULATION_SHARED", str(99 * 1024))
    check(kernels, reference, *inputs, softcap=3.0, sink_logits=torch.randn(2))
    check(kernels, reference, *random_inputs(1, 2, 1, 20, 40, 128, dtype))


def test_one_key_is_its_value(kernels):
    queries, keys, values = random_inputs(1, 2, 1, 1, 1, 16)
    dout = torch.randn(1, 2, 1, 16)
    out, lse, dq, dk, dv, _ = kernels.attention(queries, keys, values, grads=(dout, None))
    assert torch.equal(out, values.expand(1, 2, 1, 16))
    torch.testing.assert_close(lse, (queries * keys).sum(-1) / 4)
    torch.testing.assert_close(dv, dout.sum(1, keepdim=True))
    for x in (dq, dk):  # the one probability is 1 whatever the logit
        torch.testing.assert_close(x, torch.zeros_like(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mask", MASKS)
def test_ragged_batch_with_padding_queries(kernels, reference, mask):
    """A sequence shorter than the queries: the first ones are padding, see nothing, and have no gradient."""
    inputs, lengths = random_inputs(4, 2, 1, 40, 80, 16), torch.tensor([80, 33, 0, 41], dtype=torch.int32)
    bias = torch.randn(4, 1, 80)
    for x in inputs[1:]:
        for b, length in enumerate(lengths.tolist()):
            x[b, :, length:] = 1e4
    ours = check(kernels, reference, *inputs, key_bias=bias, lengths=lengths, **MASKS[mask])
    assert not ours[0][2].any()
    assert (ours[1][2] == -INF).all()
    assert (ours[1][1, :, :7] == -INF).all()
    assert not ours[2][1, :, :7].any()
    assert not ours[3][1, :, 33:].any()
    for x in inputs[1:]:  # past the length: never read
        for b, length in enumerate(lengths.tolist()):
            x[b, :, length:] = float("nan")
    again = kernels.attention(*inputs, key_bias=bias, lengths=lengths, **MASKS[mask])
    assert torch.equal(again[0], ours[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [16, 200, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("spoiled", ["queries", "dout", "dlse"])
def test_what_a_query_that_sees_nothing_holds_reaches_no_gradient(kernels, dtype, D, softcap, spoiled):
    lengths = torch.tensor([75, 3, 0], dtype=torch.int32)  # none, 67 and 70 of the queries are padding
    queries, *rest = random_inputs(3, 2, 1, 70, 75, D, dtype)
    bias, grads = torch.randn(3, 1, 75), {"dout": torch.randn(3, 2, 70, D).to(dtype), "dlse": torch.randn(3, 2, 70)}
    bias[:, :, 72:] = -INF
    blind = (torch.arange(70) < 70 - lengths[:, None])[:, None].expand(3, 2, 70)

    def results(queries, dout, dlse):
        options = {"lengths": lengths, "softcap": softcap}
        return kernels.attention(queries, *rest, key_bias=bias, grads=(dout, dlse), **options)

    clean = results(queries, **grads)
    assert torch.equal(clean[1] == -INF, blind)
    arguments = {"queries": queries, **grads}
    arguments[spoiled] = arguments[spoiled].clone()
    arguments[spoiled][blind] = float("nan")
    ours = results(**arguments)
    assert not ours[2][blind].any()
    for x, y in zip(ours[2:], clean[2:], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_of_minus_infinity_hides_a_key_from_all_but_its_own_query(kernels, reference, dtype):
    inputs, bias = random_inputs(1, 2, 2, 30, 50, 16, dtype), torch.randn(1, 2, 50)
    bias[:, :, 3:30] = -INF
    check(kernels, reference, *inputs, key_bias=bias)
    bias[:, 1] = -INF
    ours = check(kernels, reference, *inputs, key_bias=bias, window=10, sinks=2, complement=True)
    assert (ours[1][:, 1] == -INF).all()


@pytest.mark.parametrize(
    ("window", "sinks"), [(1, 0), (7, 1), (64, 0), (65, 64), (200, 5), (1, 500), (30, 70), (130, 0)]
)
def test_windows_and_sinks_across_tiles(kernels, reference, window, sinks):
    """Also what is left out: where both masks are computed, they share the causal one between them."""
    inputs = random_inputs(1, 1, 1, 100, 200, 16, torch.bfloat16)
    near = check(kernels, reference, *inputs, window=window, sinks=sinks)
    far = check(kernels, reference, *inputs, window=window, sinks=sinks, complement=True)
    whole = kernels.attention(*inputs)
    joined = kernels.merge_states((near[0], near[1]), (far[0], far[1]))
    torch.testing.assert_close(joined[0].float(), whole[0].float(), atol=0.03, rtol=0)
    torch.testing.assert_close(joined[1], whole[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 3])
def test_strided_views_in_and_out(kernels, reference, dtype, shift):
    """[B, T, H, D] storage; with a shift no row starts on 16 bytes."""

    def strided(x):
        B, H, T, D = x.shape
        storage = torch.full((B, T, H, D + 8), 55.0, dtype=x.dtype)
        to = storage.transpose(1, 2)[..., shift : shift + D]
        to.copy_(x)
        return to

    inputs = random_inputs(2, 4, 2, 20, 70, 48, dtype)
    grads = torch.randn(2, 4, 20, 48).to(dtype), torch.randn(2, 4, 20)
    plain = kernels.attention(*inputs, grads=grads)
    ours = kernels.attention(*map(strided, inputs), grads=(strided(grads[0]), grads[1]), views=strided)
    for x, y in zip(ours[:5], plain[:5], strict=True):
        assert torch.equal(x, y)
    for x in (ours[0], *ours[2:5]):  # the gap is untouched
        storage = x.as_strided((x.shape[0], x.shape[2], x.shape[1], 56), (*x.transpose(1, 2).stride()[:3], 1), 0)
        assert (storage[..., :shift] == 55).all()
        assert (storage[..., shift + 48 :] == 55).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_every_time_and_for_each_sequence_alone(kernels, monkeypatch, dtype):
    inputs = random_inputs(2, 4, 2, 40, 70, 32, dtype)
    bias, grads = torch.randn(2, 2, 70), (torch.randn(2, 4, 40, 32).to(dtype), torch.randn(2, 4, 40))
    runs = []
    for order in ("forward", "reverse"):
        monkeypatch.setenv("KVC_EMULATION_ORDER", order)
        runs.append(kernels.attention(*inputs, key_bias=bias, grads=grads))
    alone = []
    for b in range(2):
        one = [x[b : b + 1] for x in (*inputs, bias, *grads)]
        alone.append(kernels.attention(*one[:3], key_bias=one[3], grads=one[4:]))
    runs.append([torch.cat(parts) for parts in zip(*alone, strict=True)])
    for other in runs[1:]:
        for x, y in zip(runs[0], other, strict=True):
            assert torch.equal(x, y)


def test_large_logits_do_not_overflow(kernels, reference):
    queries, keys, values = random_inputs(1, 1, 1, 10, 70, 16)
    check(kernels, reference, 100 * queries, 100 * keys, values)


def test_keys_that_are_not_finite_show(kernels):
    queries, keys, values = random_inputs(1, 1, 1, 10, 70, 16, torch.bfloat16)
    keys[0, 0, 62, 3] = float("nan")  # seen from query 2 on
    out, lse = kernels.attention(queries, keys, values)
    assert out[0, 0, :2].isfinite().all()
    assert out[0, 0, 2:].isnan().all()
    assert lse[0, 0, 2:].isnan().all()


def test_no_queries_give_zero_gradients(kernels):
    queries, keys, values = random_inputs(1, 2, 1, 0, 40, 16)
    bias = torch.zeros(1, 1, 40)
    *_, dk, dv, dbias = kernels.attention(queries, keys, values, key_bias=bias, grads=(queries, None))
    assert not dk.any()
    assert not dv.any()
    assert not dbias.any()


@pytest.mark.parametrize(
    "options",
    [{"window": -1}, {"window": 3, "sinks": -1}, {"window": 3, "causal": False}, {"complement": True}, {"S": 9},
     {"D": 513}, {"D": 0}, {"Hq": 3}, {"scale": INF}, {"softcap": -1.0}, {"softcap": float("nan")}],
)  # fmt: skip
def test_invalid_sizes(kernels, options):
    sizes = {"B": 1, "Hq": 2, "Hkv": 2, "S": 4, "T": 8, "D": 16}
    sizes |= {name: options.pop(name) for name in list(options) if name in sizes}
    inputs = random_inputs(**sizes)
    with pytest.raises(emulated.LaunchError) as error:
        kernels.attention(*inputs, **{"scale": 1.0, **options})
    assert error.value.code == emulated.INVALID_VALUE


def test_empty_work(kernels):
    for sizes in ({"B": 0}, {"Hq": 0}, {"S": 0}):
        inputs = random_inputs(**({"B": 1, "Hq": 2, "Hkv": 2, "S": 4, "T": 8, "D": 16} | sizes))
        assert kernels.attention(*inputs, scale=1.0)[0].numel() == 0


def test_mixed_dtypes_are_rejected(kernels):
    queries, keys, values = random_inputs(1, 1, 1, 4, 8, 16)
    with pytest.raises(emulated.LaunchError):
        kernels.attention(queries, keys.to(torch.bfloat16), values)
