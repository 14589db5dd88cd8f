"""What attention and its gradients are, in plain PyTorch: the oracle of the tests of kernels."""

import oracle
import torch
from accuracy import Softmax, assert_within

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


def errors(tensors, grads, **options):
    """How far each of results may be off."""
    queries, keys, values, key_bias, *sinks = (None if x is None else x.detach() for x in tensors)
    (B, Hq, S, _), (Hkv, T) = queries.shape, keys.shape[1:3]
    logits = {name: options.pop(name) for name in ("scale", "softcap") if name in options}
    ends = options.get("lengths", torch.full((B,), T)).long()
    position = ends[:, None] - S + torch.arange(S)
    own = (torch.arange(T) == position[..., None])[:, None]
    if key_bias is not None:
        logits["bias"] = torch.where(own, 0, key_bias.repeat_interleave(Hq // Hkv, 1)[:, :, None])
    if sinks:
        logits |= {"sink_logits": sinks[0], "sunk": (position >= 0)[:, None]}
    softmax = Softmax(queries, keys, oracle.visible(S, T, **options)[:, None], **logits)
    found = {"out": softmax.out_error(values, queries.dtype), "lse": softmax.lse_error()}
    return found | softmax.gradient_errors(values, *grads, queries.dtype, own)


def check(tensors, **options):
    queries = tensors[0]
    grads = torch.randn(queries.shape).to(queries.dtype), torch.randn(queries.shape[:3])
    double = [None if x is None else x.detach().double().requires_grad_() for x in tensors]
    exact = results(oracle.attention, double, grads, **options)
    bounds = errors(tensors, grads, **options)
    ours = results(ops.attention, tensors, grads, **options)
    names = ["out", "lse", "dq", "dk", "dv"] + ["dbias"] * (tensors[3] is not None) + ["dsinks"] * (len(tensors) > 4)
    for name, x, y in zip(names, ours, exact, strict=True):
        assert_within(x.detach(), y.detach(), bounds[name], name)
