"""What attention and its gradients are, in plain PyTorch: the oracle of the tests of kernels."""

import oracle
import torch
from helpers import assert_as_accurate

from kvcompress import ops

MASKS = {
    "causal": {},
    "all": {"causal": False},
    "window": {"window": 37},
    "sinks": {"window": 37, "sinks": 5},
    "sinks beyond the window": {"window": 3, "sinks": 110},
    "complement": {"window": 37, "sinks": 5, "complement": True},
    "empty complement": {"window": 10_000, "complement": True},
}


def inputs(B, Hq, Hkv, S, T, D, dtype=torch.float32, bias=False):
    queries = torch.randn(B, Hq, S, D).to(dtype).requires_grad_()
    keys, values = (torch.randn(B, Hkv, T, D).to(dtype).requires_grad_() for _ in range(2))
    key_bias = None
    if bias:
        key_bias = 2 * torch.randn(B, Hkv, T)
        key_bias[..., ::5] = float("-inf")
        key_bias.requires_grad_()
    return queries, keys, values, key_bias


def results(function, tensors, grads, **options):
    """out, lse and the gradients of queries, keys, values (and key_bias, sink_logits)."""
    queries, keys, values, key_bias, *sinks = tensors
    out, lse = function(queries, keys, values, key_bias=key_bias, sink_logits=sinks[0] if sinks else None, **options)
    wanted = [x for x in tensors if x is not None]
    finite = torch.where(lse.isinf(), 0, lse)
    return out, lse, *torch.autograd.grad((out, finite), wanted, [g.to(x.dtype) for g, x in zip(grads, (out, lse))])  # noqa: B905


def plain_results(tensors, grads, **options):
    """The kernel's own formula in plain PyTorch: as results, with p = exp(logit - lse) in the gradients."""
    queries, keys, values, key_bias, *sinks = tensors
    sink_logits, cap = sinks[0] if sinks else None, options.get("softcap")
    out, lse = oracle.attention(queries, keys, values, key_bias=key_bias, sink_logits=sink_logits, **options)
    (B, _, S, D), (Hkv, T), G = queries.shape, keys.shape[1:3], queries.shape[1] // keys.shape[1]
    k, v = (x.repeat_interleave(G, 1) for x in (keys, values))
    mask = {name: options[name] for name in ("causal", "window", "sinks", "complement", "lengths") if name in options}
    logits = queries @ k.mT * D**-0.5
    slope = 1.0
    if cap is not None:
        slope = 1 - torch.tanh(logits / cap) ** 2
        logits = cap * torch.tanh(logits / cap)
    ends = options.get("lengths", torch.full((B,), T)).long()
    own = (torch.arange(T) == (ends[:, None, None] - S + torch.arange(S)[:, None]))[:, None]
    if key_bias is not None:
        logits = logits + torch.where(own, 0, key_bias.repeat_interleave(G, 1)[:, :, None]).to(logits.dtype)
    logits = logits.masked_fill(~oracle.visible(S, T, **mask)[:, None], float("-inf"))
    base = torch.where(lse.isinf(), float("inf"), lse)
    p = torch.exp(logits.float() - base[..., None].float()).to(queries.dtype)
    dout, dlse = (g.to(x.dtype) for g, x in zip(grads, (out, lse), strict=True))
    delta = (dout * out).sum(-1) - dlse
    ds = p * (dout @ v.mT - delta[..., None])
    dl = ds * slope
    heads = [x.unflatten(1, (Hkv, G)).sum(2) for x in (dl.mT @ queries * D**-0.5, p.mT @ dout)]
    found = [out, lse, dl @ k * D**-0.5, *heads]
    if key_bias is not None:
        found.append(ds.masked_fill(own, 0).sum(2).unflatten(1, (Hkv, G)).sum(2))
    if sink_logits is not None:
        found.append(-(torch.exp(sink_logits[:, None].float() - base.float()) * delta.float()).sum((0, 2)))
    return found


def check(tensors, **options):
    queries = tensors[0]
    grads = torch.randn(queries.shape).to(queries.dtype), torch.randn(queries.shape[:3])
    double = [None if x is None else x.detach().double().requires_grad_() for x in tensors]
    exact = results(oracle.attention, double, grads, **options)
    plain = plain_results([None if x is None else x.detach() for x in tensors], grads, **options)
    ours = results(ops.attention, tensors, grads, **options)
    names = ["out", "lse", "dq", "dk", "dv"] + ["dbias"] * (tensors[3] is not None) + ["dsinks"] * (len(tensors) > 4)
    for name, x, y, z in zip(names, ours, plain, exact, strict=True):
        try:
            if name == "dsinks":  # a few sums of many terms: what rounding leaves of each in a row of them
                term = (grads[0].double() * exact[0].detach()).sum(-1).abs().sum().item() + queries[0, 0].shape[0]
                error, allowed = (x.double() - z).abs().max().item(), (y.double() - z).abs().max().item()
                assert error <= 2 * allowed + torch.finfo(queries.dtype).eps * term, f"error {error:.3g}, {allowed:.3g}"
                continue
            assert_as_accurate(x.detach(), y.to(x.dtype), z.detach(), typical=True)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
