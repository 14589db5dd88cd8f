"""How far results in float32 may lie from exact ones: bounds from the number and the size of a sum's terms, element by
element, computed in float64 from the inputs. They hold for every order of a sum, so that no processor fails them.

u = 2^-24 is the rounding of one operation, relative to its result; inputs of 16 bits are exact numbers.
- Roundings: a sum of n products makes one of at most u * sum |a_i b_i| per term, n of them at worst. They are
  independent, so that the root of the sum of their squares counts: 4 * sqrt(n) of them are more than 8 standard
  deviations even where all terms have one sign (1/sqrt(3) of its most is a rounding's, 1/sqrt(3) of the last a partial
  sum's root mean square).
- Errors of factors, e_i of a_i, are independent too: `spread`, the less of sum |e_i b_i| and 4 sqrt(sum (e_i b_i)^2).
- A weight exp(x - m) of a logit with error e is off by the factor exp(e) at most. What that leaves in a softmax p is
  exact: with factors f_i, out' - out = sum p_i (f_i - 1) (v_i - out) / sum p_i f_i; sum p_i f_i >= exp(-sum p_i e_i).
- The rounding of the result to its dtype comes last.
Bounds of DMC's averages: accuracy_dmc.py.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

U = 2.0**-24
on_cuda = False  # where the ops run: conftest.py sets it
FEW = 8  # roundings of what is done once: scaling, bases of exponentials, dividing by a norm


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def least(dtype: torch.dtype) -> float:
    """What a number may lose near zero: half a step of float16's subnormal numbers, all of float32's and bfloat16's."""
    return 2.0**-25 if dtype == torch.float16 else torch.finfo(dtype).tiny


def rounded(size: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of a result once it is rounded to dtype."""
    return error + unit(dtype) * (size.abs() + error) + least(dtype)


def roundings(n: Tensor | int) -> Tensor:
    """How many times u * sum |a_i b_i| a sum of n products may be off."""
    n = torch.as_tensor(n, dtype=torch.float64)
    return torch.minimum(n, 4 * n.sqrt())


def independent(errors: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """What errors of at most so much add up to."""
    return torch.minimum(errors.abs().sum(dim), 4 * errors.square().sum(dim).sqrt())


def spread(errors: Tensor, factors: Tensor, heads: int = 0) -> Tensor:
    """What errors of at most so much leave of errors @ factors. heads: of so many heads, the others are summed too."""
    sums, squares = errors.abs() @ factors.abs(), errors.square() @ factors.square()
    if heads:
        sums, squares = (x.unflatten(1, (heads, -1)).sum(2) for x in (sums, squares))
    return torch.minimum(sums, 4 * squares.sqrt())


def assert_within(found: Tensor, exact: Tensor, bound: Tensor, name: str = "") -> None:
    """Every element is as near to the exact one as bound, or the same infinity or NaN."""
    assert found.shape == exact.shape
    assert torch.equal(found.isnan(), exact.isnan())
    infinite = exact.isinf()
    assert torch.equal(found.isinf(), infinite) and torch.equal(found[infinite].double(), exact[infinite])
    error = torch.where(exact.isfinite(), found.double() - exact, 0).abs()
    bound = torch.where(exact.isfinite(), bound, math.inf).expand_as(error)
    assert not bound.isnan().any()
    if error.numel():  # products of two errors, which the bounds leave out, and what float64 loses where terms cancel
        bound = bound * (1 + 2.0**-16) + 2.0**-42 * exact.abs().where(exact.isfinite(), 0).amax()
    if (error > bound).any():
        at = tuple(x[0].item() for x in torch.where(error > bound))
        worst = (error / bound).nan_to_num(0).max()
        what = f"{name}{list(at)}: error {error[at]:.3g} of {exact[at]:.6g}, at most {bound[at]:.3g}"
        raise AssertionError(f"{what}; worst {worst:.3g} times")


# ---- rotation ----


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Two products and their sum."""
    c, s = (table[positions.long()][:, None].double().abs() for table in (cos, sin))
    half, size = cos.shape[1], x.double().abs()
    low, high, rest = size[..., :half], size[..., half : 2 * half], size[..., 2 * half :]
    error = 2 * U * torch.cat([low * c + high * s, high * c + low * s, 0 * rest], -1)
    return rounded(torch.cat([low * c + high * s, high * c + low * s, rest], -1), error, x.dtype)


# ---- softmax ----


class Softmax:
    """The weights of queries [B, Hq, S, D] over keys [B, Hkv, T, D], and how far those of a kernel may be off.

    seen: bool, broadcast to [B, Hq, S, T]; bias: likewise, added to the logits; sink_logits [Hq], of queries `sunk`.
    p [B, Hq, S, T]; logit errors `error`; `relative`, errors of exp(logit - maximum).
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        seen: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
        sink_logits: Tensor | None = None,
        sunk: Tensor | None = None,
    ) -> None:
        (Hq, _, D), Hkv = queries.shape[1:], keys.shape[1]
        self.scale = D**-0.5 if scale is None else scale
        self.queries, self.heads = queries.double(), Hkv
        self.keys = keys.double().repeat_interleave(Hq // Hkv, 1)
        # of 16 bits, CUDA rounds the weights before they meet the values, and p and ds before a gradient's products
        half = on_cuda and queries.dtype == keys.dtype != torch.float32
        self.half = (unit(queries.dtype), least(queries.dtype)) if half else (0.0, 0.0)
        x = (self.queries @ self.keys.mT).mul_(self.scale)  # in place: they may be many
        sizes = (self.queries.abs() @ self.keys.abs().mT).mul_(abs(self.scale))
        error = sizes.mul_(roundings(D + 2) * U).add_(x.abs(), alpha=2 * U)
        self.softcap, self.uncapped = softcap, (x, error)
        if softcap is not None:
            ends = [((x + e) / softcap).tanh_().mul_(softcap) for e in (-error, error)]
            x = (x / softcap).tanh_().mul_(softcap)
            # of 16 bits tanh is within 2^-21 on CUDA, else within a few u of itself
            coarse = 8 * U * softcap if self.half[0] else 0.0
            error = torch.maximum(x - ends[0], ends[1] - x).add_(x.abs(), alpha=6 * U).add_(coarse)
        if bias is not None:
            x = x + bias.double()
            seen = seen & x.isfinite()
            error = error + U * torch.where(seen, x, 0).abs()
        self.sink = x.new_full((*x.shape[:3], 1), -math.inf)
        if sink_logits is not None:
            self.sink = sink_logits.double()[:, None, None].expand_as(self.sink)
            if sunk is not None:
                self.sink = self.sink.masked_fill(~sunk[..., None], -math.inf)
        # the difference to a maximum, the base of the exponential, a rescaling by another maximum; the exponential
        of_sink = torch.where(self.sink.isfinite(), self.sink, 0).abs()
        self.top = torch.maximum(torch.where(seen, x, 0).abs().amax(-1), of_sink[..., 0])
        step = U * (4 * self.top + FEW)[..., None]
        self.error = error + step
        x = x.masked_fill(~seen, -math.inf)
        self.lse = torch.logaddexp(x.logsumexp(-1), self.sink[..., 0])
        self.p = x.sub_(self.safe_lse[..., None]).exp_()
        self.count = seen.expand_as(x).sum(-1) + 1
        of_sink = (torch.exp(self.sink - self.safe_lse[..., None]) * step)[..., 0]
        moved = self.p * self.error
        self.mean_error = moved.sum(-1) + of_sink
        squares = moved.square_().sum(-1) + of_sink.square()
        norm_error = torch.minimum(self.mean_error, 4 * squares.sqrt())
        self.norm_error = norm_error + U * (roundings(self.count) + FEW)

    @functools.cached_property
    def relative(self) -> Tensor:
        return torch.expm1(self.error)

    @property
    def safe_lse(self) -> Tensor:
        return torch.where(self.lse == -math.inf, 0, self.lse)

    def lse_error(self) -> Tensor:
        error = self.norm_error + 2 * U * (self.safe_lse.abs() + self.top)
        return torch.where(self.lse == -math.inf, 0, error)

    def probability_error(self) -> Tensor:
        return (self.error + self.norm_error[..., None]).add_(FEW * U).expm1_().mul_(self.p).add_(least(torch.float32))

    def slopes(self) -> tuple[Tensor, Tensor]:
        """1 - tanh^2 under a softcap, and its error: a tanh is within 2^-21, its slope changes by e^(2 |x|) at most."""
        x, error = self.uncapped
        if self.softcap is None:
            return torch.ones_like(x), torch.zeros_like(x)
        slope = 1 - torch.tanh(x / self.softcap) ** 2
        turned = slope * torch.expm1((2 * error / self.softcap).clamp(max=80))
        return slope, turned.clamp(max=1) + 16 * U

    def _halved(self, x: Tensor) -> Tensor:
        return self.half[0] * x.abs() + self.half[1] * (x != 0)

    def out_error(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Of p @ values [B, Hkv, T, D], rounded to dtype."""
        v = values.double().repeat_interleave(self.p.shape[1] // self.heads, 1)
        out, weights = self.p @ v, self.p * self.relative
        squares = weights.square()
        # sum (w (v - out))^2, multiplied out: no [S, T, D]
        apart = squares @ v.square() - 2 * out * (squares @ v) + out.square() * squares.sum(-1, keepdim=True)
        sums = weights @ v.abs() + out.abs() * weights.sum(-1, keepdim=True)
        error = torch.minimum(sums, 4 * apart.clamp(min=0).sqrt()) * torch.exp(self.mean_error)[..., None]
        error = error + U * (roundings(self.count) + FEW)[..., None] * (self.p @ v.abs() + out.abs())
        # weights are shares of the largest so far when they are rounded
        halved = self.half[0] * self.p + self.half[1] * self.p.amax(-1, keepdim=True) * (self.p > 0)
        return rounded(out, error + spread(halved, v), dtype)

    def gradient_errors(
        self, values: Tensor, dout: Tensor, dlse: Tensor, dtype: torch.dtype, own: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Of dq, dk, dv, dbias [B, Hkv, T] (own: keys without one, [B, 1, S, T]) and dsinks [Hq]."""
        (B, Hq, S, T), D = self.p.shape, values.shape[-1]
        v, do = values.double().repeat_interleave(Hq // self.heads, 1), dout.double()
        blind = self.lse == -math.inf
        do, dlse = do.masked_fill(blind[..., None], 0), dlse.double().masked_fill(blind, 0)
        out, p = self.p @ v, self.p
        delta = (do * out).sum(-1) - dlse
        delta_error = independent(self.out_error(values, dtype) * do, -1) + U * roundings(D + 2) * (
            (do * out).abs().sum(-1) + dlse.abs()
        )
        # p is made of lse, whose error is one of all keys of a query, as delta's is
        lse_error = torch.expm1(self.lse_error() + 2 * U * self.safe_lse.abs())[..., None]
        dp = do @ v.mT
        dp_error = U * roundings(D) * (do.abs() @ v.abs().mT)
        change = dp - delta[..., None]
        ds, (slope, slope_error) = p * change, self.slopes()
        of_key = p * (1 + self.relative) * dp_error + p * self.relative * change.abs() + 4 * U * ds.abs()
        of_query = p * delta_error[..., None] + ds.abs() * lse_error
        dl = ds * slope
        own_error = of_key * slope + ds.abs() * slope_error + self._halved(dl)
        k, q, scale = self.keys, self.queries, abs(self.scale)
        both = [(delta_error[..., None] * ((p * slope) @ k)).abs(), lse_error * (dl @ k).abs()]
        dq = spread(own_error, k) + sum(both) + U * (roundings(T) + FEW) * (dl.abs() @ k.abs())
        many = U * (roundings(S * Hq // self.heads) + FEW)

        def summed(x: Tensor) -> Tensor:
            return x.unflatten(1, (self.heads, -1)).sum(2)

        dk = spread((own_error + of_query * slope).mT, q, self.heads) + many * summed(dl.abs().mT @ q.abs())
        p_error = p * (self.relative + lse_error) + self._halved(p)
        dv = spread(p_error.mT, do, self.heads) + many * summed(p.mT @ do.abs())
        found = {
            "dq": rounded(dl @ k * scale, scale * dq, dtype),
            "dk": rounded(summed(dl.mT @ q) * scale, scale * dk, dtype),
            "dv": rounded(summed(p.mT @ do), dv, dtype),
        }
        hidden = torch.zeros_like(p[:1], dtype=torch.bool) if own is None else own
        terms = (of_key + of_query).masked_fill(hidden, 0).unflatten(1, (self.heads, -1))
        sums = ds.abs().masked_fill(hidden, 0).unflatten(1, (self.heads, -1)).sum((2, 3))
        found["dbias"] = independent(terms, (2, 3)) + many * sums + least(torch.float32)
        sink = torch.exp(self.sink[..., 0] - self.safe_lse)
        of_sink = torch.expm1(lse_error[..., 0] + U * (4 * self.top + FEW)) * delta.abs()
        found["dsinks"] = independent(sink * (delta_error + of_sink), (0, 2)) + U * roundings(B * S) * (
            sink * delta.abs()
        ).sum((0, 2))
        return found


def of_pages(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    end: Tensor,
    *,
    block_table: Tensor | None = None,
    value_table: Tensor | None = None,
    begin: Tensor | None = None,
    sinks: int = 0,
    causal: bool = False,
    **logits: object,
) -> tuple[Softmax, Tensor]:
    """The softmax of oracle.decode's arguments, and the values [B, Hkv, T, D] that it weighs."""
    B, _, S, _ = queries.shape
    R, T = len(end), max(int(end.max()), 1)
    t, last = torch.arange(T), end.long()[:, None]
    first = torch.zeros_like(last) if begin is None else begin.long()[:, None]
    held = (t < last) & ((t >= first) | (t < first.clamp(max=sinks)))  # [R, T]
    rows = []
    for pages, table in ((k_pages, block_table), (v_pages, block_table if value_table is None else value_table)):
        P = pages.shape[1]
        if table is None:
            found = torch.nn.functional.pad(pages[:R, :T], (0, 0, 0, max(T - P, 0)))
        else:
            found = pages[table.long()[:, (t // P).clamp(max=table.shape[1] - 1)].clamp(0, len(pages) - 1), t % P]
        rows.append(torch.where(held[..., None], found, 0).view(B, R // B, T, -1))
    least_end = last[..., None] - (S - 1 - torch.arange(S)[:, None] if causal else 0)
    seen = (held[:, None] & (t < least_end)).view(B, R // B, -1, T).repeat_interleave(queries.shape[1] // (R // B), 1)
    return Softmax(queries, rows[0], seen, **logits), rows[1]  # type: ignore[arg-type]


def probabilities(columns: int, queries: Tensor, k: Tensor, v: Tensor, end: Tensor, **options: object) -> Tensor:
    """Of oracle.decode's probabilities, of whose columns those behind a row's keys keep what they had."""
    softmax, _ = of_pages(queries, k, v, end, **options)  # type: ignore[arg-type]
    begin = options.get("begin")
    error = softmax.probability_error()[:, :, 0]
    (B, Hq, _), Hkv = error.shape, len(end) // len(queries)
    bound = torch.zeros(B, Hq, columns, dtype=torch.float64)
    for r in range(B * Hkv):
        first, last = 0 if begin is None else int(begin[r]), int(end[r])  # type: ignore[index]
        heads = slice(r % Hkv * Hq // Hkv, (r % Hkv + 1) * Hq // Hkv)
        bound[r // Hkv, heads, : max(last - first, 0)] = error[r // Hkv, heads, first : max(last, first)]
    return bound


def merged(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], errors: tuple[tuple[Tensor, Tensor], ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Of out, lse and a's share where exact states a and b, known with these errors of (out, lse), are joined."""
    lses = torch.stack([a[1], b[1]])
    lse, weights = lses.logsumexp(0), lses.softmax(0).nan_to_num(0)
    finite = lses.isfinite()
    sizes = torch.where(finite, lses, 0).abs().sum(0)
    of_lse = [torch.where(finite[i], errors[i][1], 0) for i in (0, 1)]
    share = weights[0] * weights[1] * torch.expm1(of_lse[0] + of_lse[1] + U * (2 * sizes + FEW))
    w, outs = weights[..., None], torch.stack([a[0], b[0]]).masked_fill(~finite[..., None], 0)
    of_out = sum(w[i] * torch.where(finite[i][..., None], errors[i][0], 0) for i in (0, 1))
    of_out = of_out + share[..., None] * (outs[0] - outs[1]).abs() + FEW * U * (w * outs.abs()).sum(0)
    of_lse = (weights * torch.stack(of_lse)).sum(0) + U * (2 * sizes + FEW)
    out = rounded((w * outs).sum(0), of_out, dtype)
    return out, torch.where(lse.isfinite(), of_lse, 0), share + FEW * U * weights[0]


def shared(
    near: tuple[Tensor, Tensor], weights: Tensor, far_lse: Tensor, v_pages: Tensor, begin: Tensor, end: Tensor,
    block_table: Tensor,
) -> Tensor:  # fmt: skip
    """Of oracle.decode_shared's out, where it is not skipped."""
    (out, near_lse), Hkv = near, len(end) // len(near[0])
    B, Hq, _, D = out.shape
    far, error = (torch.zeros(B, Hq, 1, D, dtype=torch.float64) for _ in range(2))
    for b in range(B):
        for h in range(Hq):
            r = b * Hkv + h // (Hq // Hkv)
            first, last = int(begin[r]), int(end[r])
            t = torch.arange(first, last)
            v = v_pages[block_table[r, t // v_pages.shape[1]].long(), t % v_pages.shape[1]].double()
            w = weights[b, h, : last - first].double()
            far[b, h] = w @ v
            error[b, h] = U * (roundings(len(t)) + FEW) * (w.abs() @ v.abs())
    near_out = torch.where(near_lse[..., None] == -math.inf, 0, out).double()
    both = near_lse.double() - far_lse.double()
    gate = both.sigmoid()[..., None]
    size = torch.where(both.isfinite(), both, 0).abs()[..., None]
    gate_error = gate * (1 - gate) * torch.expm1(U * (size + FEW)) + FEW * U * gate
    total = gate_error * (near_out.abs() + far.abs()) + (1 - gate) * error
    total = total + FEW * U * (gate * near_out.abs() + (1 - gate) * far.abs())
    return rounded(gate * near_out.abs() + (1 - gate) * far.abs(), total, out.dtype)


# ---- scores ----


def window_scores(
    queries: Tensor, keys: Tensor, *, reduce: str = "mean", pooling: str = "avg", kernel_size: int = 5,
    lengths: Tensor | None = None, skip_last: int | None = None, mask_first: int = 0, mask_last: int = 0,
    **logits: object,
) -> Tensor:  # fmt: skip
    """Probabilities' errors reduced and pooled as the probabilities are: both are sums, or of maxima the most."""
    (B, Hq, W, _), (Hkv, T) = queries.shape, keys.shape[1:3]
    skip_last = W if skip_last is None else skip_last
    ends = torch.full((B,), T) if lengths is None else lengths.long()
    t, end = torch.arange(T), ends[:, None, None]
    seen = (t <= end - W + torch.arange(W)[:, None]) & (t >= mask_first) & (t < end - mask_last)
    there = (t < ends[:, None])[:, None, :, None]  # what lies behind may be NaN
    softmax = Softmax(queries, torch.where(there, keys, 0), seen[:, None], **logits)  # type: ignore[arg-type]
    p, error = (x.unflatten(1, (Hkv, -1)) for x in (softmax.p, softmax.probability_error()))
    scored = (t < ends[:, None] - skip_last)[:, None]
    rows = Hq // Hkv * W
    if reduce == "max":
        p, error = p.amax((2, 3)), error.amax((2, 3))
    else:
        p, error = p.sum((2, 3)), independent(error, (2, 3)) + U * (roundings(rows) + FEW) * p.sum((2, 3))
        if reduce == "mean":
            p, error = p / rows, error / rows
    pool = torch.nn.functional.avg_pool1d if pooling == "avg" else torch.nn.functional.max_pool1d
    p, error = (pool(x.masked_fill(~scored, 0), kernel_size, stride=1, padding=kernel_size // 2) for x in (p, error))
    error = error + U * (kernel_size + FEW) * p + least(torch.float32)
    return torch.where(scored, error, 0)[..., : T - skip_last]


def layer_similarity(queries: Tensor, keys: Tensor, *, sinks: int = 0, recent: int = 0, **logits: object) -> Tensor:
    """Jensen-Shannon divergences [Hq, L, L]: a probability's error times the slope |log2(2p / (p + r))| / 2, its square
    where that is 0, and the rounding of each key's term, whose logarithm of a number near 1 has an absolute error."""
    (L, Hq, S, _), T = queries.shape, keys.shape[2]
    position, key = torch.arange(T - S, T)[:, None], torch.arange(T)
    seen = (key >= sinks) & (key <= position - recent)
    softmax = Softmax(queries, keys, seen, **logits)  # type: ignore[arg-type]
    p, error = softmax.p, softmax.probability_error()
    bound = torch.zeros(Hq, L, L, dtype=torch.float64)
    for a in range(L):
        for b in range(a):
            one, other = p[a], p[b]
            slopes = [(2 * x / (one + other)).clamp(min=2.0**-127).log2().nan_to_num(0).abs() for x in (one, other)]
            of_p = [e * (slope / 2 + e / x.clamp(min=2.0**-126)) for e, slope, x in zip(
                (error[a], error[b]), slopes, (one, other), strict=True)]  # fmt: skip
            terms = U * FEW * (one + other).sum(-1) + sum(independent(x, -1) for x in of_p)
            bound[:, a, b] = bound[:, b, a] = terms.sum(-1)
    return bound
