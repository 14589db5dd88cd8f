"""DMC and DMS as their ops make them together: training attention, inference, and what must hold for both."""

import oracle
import pytest
import torch
from backends import BACKENDS
from helpers import DTYPES, covering

from kvcompress import ops
from kvcompress.ops import Noise, PageTable, Tail

INF = float("inf")


def tables(T, D, dtype=torch.float32):
    angles = torch.arange(T, dtype=dtype)[:, None] * 10_000.0 ** (-2 * torch.arange(D // 2, dtype=dtype) / D)
    return angles.cos(), angles.sin()


def live(x, neuron):
    """x with the neuron's coordinate 0."""
    mask = torch.ones(x.shape[-1], dtype=x.dtype)
    mask[neuron] = 0
    return x * mask


def training(module, q, k, v, *, neuron=-1, noise=None, hard=False, window=None, rotate=True):
    """DMC's training attention from un-rotated projections; module: ops or reference. Its out and decisions."""
    T, D = q.shape[2:]
    cos, sin = tables(T, D, torch.float64 if q.dtype == torch.float64 else torch.float32)

    def turn(x):
        return live(module.rope(x, cos, sin), neuron) if rotate else x

    alpha, _, tempered = module.dmc_decisions(k[..., neuron], noise=noise, hard=hard)
    omega = module.dmc_importance(q[..., neuron], k.shape[1])
    mean_k, mean_v, _ = module.dmc_accumulate(k, v, alpha, omega, neuron=neuron, window=window)
    bias = module.dmc_mask(tempered)
    out, _ = module.attention(turn(live(q, neuron)), turn(mean_k), mean_v, key_bias=bias)
    return out, alpha


def projections(B, Hq, Hkv, T, D, dtype=torch.float32, neuron=-1, spread=3.0):
    q = torch.randn(B, Hq, T, D)
    k, v = (torch.randn(B, Hkv, T, D) for _ in range(2))
    q[..., neuron] -= 5
    k[..., neuron] = 5 + spread * torch.randn(B, Hkv, T)
    return tuple(x.to(dtype) for x in (q, k, v))


# ---- training ----

Q = [[1, 0, 1], [0, 1, -1], [1, 1, 0], [-1, 0, 1], [0.5, 1, 0.5], [1, -1, 1]]
K = [[1, 0, -1], [1, 3, 2], [1, -1, 2], [0, 1, 1], [5, 1, -4], [-1, 2, 0]]
V = [[3, 0, 0, 1], [0, 3, 0, 1], [0, 1, 2, 1], [0, 0, 5, 0], [5, 0, 0, 5], [1, 2, 3, 4]]
OUT = [[3.000000, 0.000000, 0.000000, 1.000000], [2.082791, 0.917209, 0.000000, 1.000000],
       [1.177938, 1.129150, 0.692912, 1.000000], [1.329351, 0.462968, 1.721960, 0.742861],
       [2.136721, 0.466420, 1.366371, 1.952899], [2.008044, 0.523607, 1.236285, 1.577575]]  # fmt: skip
DQ = [[0.000000, 0.000000, 0.000000, -1.101113], [0.187160, 0.192201, 0.247135, 0.512748],
      [0.243878, -0.445838, 0.725905, -0.003210], [1.011623, 0.119315, 0.411327, 0.236547],
      [4.377968, 0.440635, -3.131667, 0.430410], [0.880238, 1.689008, -2.773223, -0.331666]]  # fmt: skip
DK = [[-1.948898, 0.338279, 1.985923, 0.000000], [0.118801, -0.130460, 0.148551, 22.609697],
      [0.333468, 0.146645, 0.353598, 4.308527], [-0.068213, -0.036355, 0.529496, -6.622097],
      [0.945002, 0.293083, 1.009438, -4.521978], [0.611885, -0.610357, 0.611885, 2.157867]]  # fmt: skip
DV = [3.232802, 0.799454, 0.893703, 0.583837, 0.386559, 0.103645]


@pytest.mark.parametrize("module", [ops, oracle])
def test_what_is_worked_out_by_hand(module):
    """Section 12 B of the method: 6 tokens, D 4, the last coordinate decides; loss = sum of (d + 1) out[t, d]."""
    dtype = torch.float64 if module is oracle else torch.float32
    neurons = torch.tensor([0.5, 0.25, 0.75, 0.5, 0.75, 0.5]).double().logit() - 5
    decide = torch.tensor([4.8, 5.1, 5.02, 4.95, 5.06, 4.98]).double()
    q = torch.cat([torch.tensor(Q).double(), neurons[:, None]], 1)
    k = torch.cat([torch.tensor(K).double(), decide[:, None]], 1)
    q, k, v = (x.to(dtype)[None, None].requires_grad_() for x in (q, k, torch.tensor(V)))
    noise = torch.tensor([0.3, -0.05, 0.01, 0.02, -0.1, 0.05], dtype=dtype)[None, None]
    out, _ = training(module, q, k, v, noise=noise)
    (out * torch.arange(1, 5)).sum().backward()
    # gates of float32: 1 ulp of a logit near 5 is 5e-6 of the tempered one
    tolerance = {"rtol": 1e-5, "atol": 1e-4 if module is ops else 2e-6}
    torch.testing.assert_close(out[0, 0].double(), torch.tensor(OUT).double(), **tolerance)
    torch.testing.assert_close(q.grad[0, 0].double(), torch.tensor(DQ).double(), **tolerance)
    torch.testing.assert_close(k.grad[0, 0].double(), torch.tensor(DK).double(), **tolerance)
    expected = torch.tensor(DV).double()[:, None] * torch.arange(1, 5)
    torch.testing.assert_close(v.grad[0, 0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("G", "T", "window", "backend"), covering([1, 2, 8], [1, 2, 70], [None, 12], BACKENDS), indirect=["backend"]
)
def test_training_attention_and_its_gradients_are_the_dense_ones(backend, G, T, window):
    tensors = projections(1, 2 * G, 2, T, 16)
    # tempered logits of order 1, so that gradients do not vanish
    noise = 0.1 * torch.randn(1, 2, T) - (tensors[1][..., -1] - 5)
    grad = torch.randn(1, 2 * G, T, 16)
    ours, exact = ([x.to(kind).requires_grad_() for x in tensors] for kind in (torch.float32, torch.float64))
    out, _ = training(ops, *ours, noise=noise, window=window)
    dense, _ = training(oracle, *exact, noise=noise.double(), window=window)
    torch.testing.assert_close(out.double(), dense, rtol=1e-4, atol=1e-4)
    for name, x, y in zip("qkv", torch.autograd.grad(out, ours, grad), torch.autograd.grad(dense, exact, grad.double()),
                          strict=True):  # fmt: skip
        scale = y.abs().max().clamp(min=1)
        assert ((x - y).abs().max() / scale).item() < 1e-4, name


@pytest.mark.parametrize(("dtype", "hard", "backend"), covering(DTYPES, [False, True], BACKENDS), indirect=["backend"])
def test_a_model_that_never_merges_is_the_dense_one(backend, dtype, hard):
    """Bit for bit on a CPU; on CUDA in 16 bits a bias of keys, here of zeros, leaves the quick path of exponents."""
    q, k, v = projections(1, 4, 2, 80, 32, dtype)
    k[..., -1] = -100
    cos, sin = tables(80, 32)
    out, alpha = training(ops, q, k, v, hard=hard)
    assert not alpha.any()
    dense, _ = ops.attention(*(live(ops.rope(live(x, -1), cos, sin), -1) for x in (q, k)), v)
    if backend in ("emulated", "cuda") and dtype != torch.float32:
        torch.testing.assert_close(out, dense, rtol=torch.finfo(dtype).eps, atol=1e-3)
    else:
        assert torch.equal(out, dense)


def test_a_model_that_always_merges_reads_the_running_mean(backend):
    q, k, v = projections(1, 4, 2, 80, 16)
    k[..., -1] = 100
    for hard in (False, True):
        out, _ = training(ops, q, k, v, hard=hard)
        weight = ops.dmc_importance(q[..., -1], 2)[..., None]
        mean = (weight * v).cumsum(2) / weight.cumsum(2)
        torch.testing.assert_close(out, mean.repeat_interleave(2, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hard", [False, True])
def test_no_output_depends_on_a_later_token(backend, hard):
    q, k, v = projections(1, 4, 2, 140, 16)
    noise = Noise(1)
    out, _ = training(ops, q, k, v, noise=noise, hard=hard)
    for t in (1, 64, 100, 139):
        edited = [x.clone() for x in (q, k, v)]
        for x in edited:
            x[:, :, t:] = torch.randn_like(x[:, :, t:])
        changed, _ = training(ops, *edited, noise=noise, hard=hard)
        torch.testing.assert_close(changed[:, :, :t], out[:, :, :t], rtol=1e-5, atol=1e-6)
        assert not torch.equal(changed, out)


def test_which_coordinate_decides_is_immaterial_without_rotation(backend):
    q, k, v = projections(1, 4, 2, 70, 16)
    order = [15, *range(1, 15), 0]
    out, _ = training(ops, q, k, v, noise=Noise(2), rotate=False)
    swapped, _ = training(ops, q[..., order], k[..., order], v, noise=Noise(2), rotate=False, neuron=0)
    torch.testing.assert_close(out, swapped, rtol=1e-5, atol=1e-5)


def test_the_order_of_query_heads_of_a_group_is_immaterial(backend):
    q, k, v = projections(1, 6, 2, 70, 16)
    order = [2, 0, 1, 4, 5, 3]
    out, _ = training(ops, q, k, v)
    permuted, _ = training(ops, q[:, order], k, v)
    torch.testing.assert_close(out[:, order], permuted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_extreme_logits_give_finite_outputs_and_gradients(backend, size):
    q, k, v = projections(1, 2, 1, 90, 16)
    k[..., -1] = torch.where(torch.rand(1, 1, 90) < 0.5, size, -size)
    q[..., -1] = torch.where(torch.rand(1, 2, 90) < 0.5, 100.0, -100.0)
    for merging in (False, True):
        if merging:
            k[..., -1] = size  # every earlier key is hidden
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out, _ = training(ops, *tensors)
        assert out.isfinite().all()
        for x in torch.autograd.grad(out.square().sum(), tensors):
            assert x.isfinite().all()


# ---- inference ----


@pytest.mark.parametrize(
    ("window", "chunk", "backend"), covering([None, 3], [1, 7, 30], BACKENDS), indirect=["backend"]
)
def test_training_with_hard_decisions_is_inference(backend, window, chunk):
    B, Hq, Hkv, T, D, P = 2, 4, 2, 30, 16, 8
    q, k, v = projections(B, Hq, Hkv, T, D)
    expected, alpha = training(ops, q, k, v, hard=True, window=window)
    cos, sin = tables(T, D)
    ints = {"dtype": torch.int32}
    R, pages = B * Hkv, B * Hkv * 8
    table = PageTable(torch.zeros(R, 8, **ints), torch.zeros(R, **ints), torch.zeros(pages, **ints),
                      torch.arange(pages, **ints), torch.tensor([pages, 0], **ints))  # fmt: skip
    k_pages, v_pages = (torch.zeros(pages, P, D) for _ in range(2))
    tail = Tail.empty(R, D, window=window)
    rotated = live(ops.rope(live(q, -1), cos, sin), -1)
    for begin in range(0, T, chunk):
        part = slice(begin, min(begin + chunk, T))
        omega = ops.dmc_importance(q[:, :, part, -1], Hkv)
        merges = ops.dmc_decisions(k[:, :, part, -1], hard=True).alpha
        places = torch.arange(part.start, part.stop, **ints).expand(B, -1)
        ops.dmc_append_(
            k_pages, v_pages, table, tail, k[:, :, part], v[:, :, part], merges, omega, cos=cos, sin=sin,
            positions=places, neuron=-1, window=window,
        )  # fmt: skip
        if chunk == 1:
            out, _ = ops.decode(rotated[:, :, part], k_pages, v_pages, table.lengths, block_table=table.block_table)
            torch.testing.assert_close(out, expected[:, :, part], rtol=1e-5, atol=1e-5)
    # the last query sees all slots
    out, _ = ops.decode(rotated[:, :, -1:], k_pages, v_pages, table.lengths, block_table=table.block_table)
    torch.testing.assert_close(out, expected[:, :, -1:], rtol=1e-5, atol=1e-5)
    assert torch.equal(table.lengths, (1 + (1 - alpha[..., 1:]).sum(-1)).flatten().int())
    assert int((table.refs > 0).sum()) == int((-(-table.lengths // P)).sum())


# ---- DMS: no merging; what the next token marks is dropped when it leaves the window ----


def dms(q, k, v, tempered, window):
    """Near part: a window and the own token. Far part: the rest, with the bias of the decisions."""
    near = ops.attention(q, k, v, window=window + 1)
    far = ops.attention(q, k, v, window=window + 1, complement=True, key_bias=ops.dmc_mask(tempered))
    return ops.merge_states(near, far)[0]


@pytest.mark.parametrize("window", [0, 1, 4, 99])
def test_dms_is_eviction_of_marked_tokens_outside_the_window(backend, window):
    q, k, v = projections(2, 4, 2, 90, 16)
    alpha, _, tempered = ops.dmc_decisions(k[..., -1], hard=True)
    kept = torch.cat([alpha[..., 1:] == 0, torch.ones(2, 2, 1, dtype=torch.bool)], -1).repeat_interleave(2, 1)
    distance = torch.arange(90)[:, None] - torch.arange(90)
    seen = (distance >= 0) & ((distance <= window) | kept[:, :, None])
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(dms(q, k, v, tempered, window), dense, rtol=1e-5, atol=1e-5)
    if window >= 90:
        torch.testing.assert_close(dense, ops.attention(q, k, v)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 4, 99])
def test_dms_gradients_are_the_dense_ones(backend, window):
    q, k, v = projections(1, 4, 2, 70, 16)
    noise = 0.1 * torch.randn(1, 2, 70) - (k[..., -1] - 5)
    grad = torch.randn(1, 4, 70, 16)
    ours, exact = ([x.to(kind).requires_grad_() for x in (q, k, v)] for kind in (torch.float32, torch.float64))
    found = dms(*ours, ops.dmc_decisions(ours[1][..., -1], noise=noise).tempered, window)
    bias = oracle.dmc_mask(oracle.dmc_decisions(exact[1][..., -1], noise=noise.double())[2])
    distance = torch.arange(70)[:, None] - torch.arange(70)
    logits = exact[0] @ exact[1].repeat_interleave(2, 1).mT / 4
    logits = logits + torch.where(distance > window, bias.repeat_interleave(2, 1)[:, :, None], 0)
    dense = logits.masked_fill(distance < 0, -INF).softmax(-1) @ exact[2].repeat_interleave(2, 1)
    torch.testing.assert_close(found.double(), dense, rtol=1e-4, atol=1e-4)
    for x, y in zip(
        torch.autograd.grad(found, ours, grad), torch.autograd.grad(dense, exact, grad.double()), strict=True
    ):
        assert ((x - y).abs().max() / y.abs().max()).item() < 1e-4
