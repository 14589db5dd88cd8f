"""Queries whose every logit is -inf see no key: out 0 and lse -inf in every op, on every backend, and in the oracle."""

import oracle
import pytest
import torch

from kvcompress import ops

INF = float("inf")
B, HQ, HKV, D, P = 1, 4, 2, 8, 4
BLIND = 1  # the query head whose queries are -inf where all keys are positive: its logits are -inf


def some(S: int, T: int):
    """queries [B, HQ, S, D], of which head BLIND sees nothing; keys and values [B, HKV, T, D]."""
    queries, keys = torch.randn(B, HQ, S, D), torch.randn(B, HKV, T, D)
    keys[..., 0] = keys[..., 0].abs() + 0.1
    queries[:, BLIND, :, 0] = -INF
    return queries, keys, torch.randn(B, HKV, T, D)


def check(found, wanted, sink=None):
    (out, lse), rest = found[:2], [h for h in range(HQ) if h != BLIND]
    assert (out[:, BLIND] == 0).all() and (lse[:, BLIND] == (-INF if sink is None else sink[BLIND])).all()
    assert out.isfinite().all() and lse[:, rest].isfinite().all()
    for x, y in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=2e-5, atol=2e-5)


def in_pages(keys, values):
    """Rows of pages, their table and lengths."""
    R, T = B * HKV, keys.shape[2]
    blocks = -(-T // P)
    pages = [torch.nn.functional.pad(x, (0, 0, 0, blocks * P - T)).reshape(R * blocks, P, D) for x in (keys, values)]
    return *pages, torch.arange(R * blocks, dtype=torch.int32).view(R, blocks), torch.full((R,), T, dtype=torch.int32)


SINKS = [None, [0.5, -1.0, 0.0, 2.0], [-INF] * HQ]


@pytest.fixture
def sink(request, backend):
    """None or sink_logits, on the backend's device."""
    return request.param and torch.tensor(request.param)


@pytest.mark.parametrize("sink", SINKS, indirect=True)
@pytest.mark.parametrize(("S", "T"), [(1, 5), (1, 700), (5, 40), (20, 40)])
def test_decode(backend, S, T, sink):
    q, k, v = some(S, T)
    k_pages, v_pages, table, end = in_pages(k, v)
    options = {"block_table": table, "causal": S > 1, "sink_logits": sink}
    found = ops.decode(q, k_pages, v_pages, end, **options)
    exact = (x.double() for x in (q, k_pages, v_pages))
    check(found, oracle.decode(*exact, end, **options), sink)


@pytest.mark.parametrize("sink", SINKS, indirect=True)
@pytest.mark.parametrize(("S", "T"), [(1, 5), (40, 70), (70, 70)])
@pytest.mark.parametrize("window", [None, 9])
def test_attention(backend, S, T, sink, window):
    q, k, v = some(S, T)
    options = {"sink_logits": sink, "window": window}
    found = ops.attention(q, k, v, **options)
    check(found, oracle.attention(q.double(), k.double(), v.double(), **options), sink)


def test_probabilities_are_zeros(backend):
    q, k, v = some(1, 700)
    k_pages, v_pages, table, end = in_pages(k, v)
    found, wanted = torch.full((B, HQ, 700), 7.0), torch.full((B, HQ, 700), 7.0).double()
    options = {"block_table": table}
    exact = (x.double() for x in (q, k_pages, v_pages))
    check(
        ops.decode(q, k_pages, v_pages, end, probabilities=found, **options),
        oracle.decode(*exact, end, probabilities=wanted, **options),
    )
    assert (found[:, BLIND] == 0).all()
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("tau", [None, 0.0, 0.5])
@pytest.mark.parametrize("blind", ["near", "far", "both"])
def test_a_side_without_attention_is_left_out(backend, blind, tau):
    near, lse = torch.randn(B, HQ, 1, D), torch.randn(B, HQ, 1)
    weights, far_lse, v = torch.rand(B, HQ, 9), torch.randn(B, HQ, 1), torch.randn(B, HKV, 9, D)
    if blind != "far":
        near[:, BLIND], lse[:, BLIND] = 0, -INF
    if blind != "near":
        weights[:, BLIND], far_lse[:, BLIND] = 0, -INF
    _, v_pages, table, end = in_pages(v, v)
    rest = {"block_table": table, "tau": tau}
    out, skipped = ops.decode_shared((near, lse), weights, far_lse, v_pages, torch.zeros_like(end), end, **rest)
    exact = (near.double(), lse.double()), weights.double(), far_lse.double(), v_pages.double()
    wanted = oracle.decode_shared(*exact, torch.zeros_like(end), end, **rest)
    assert torch.equal(skipped, wanted[1])
    torch.testing.assert_close(out.double(), wanted[0], rtol=2e-5, atol=2e-5)
    if blind == "both":
        assert (out[:, BLIND] == 0).all()


@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)])
def test_merged_states(backend, sides):
    states = []
    for blind in sides:
        out, lse = torch.randn(B, HQ, 3, D), torch.randn(B, HQ, 3)
        if blind:
            out[:, BLIND], lse[:, BLIND] = float("nan"), -INF  # whatever lies there
        states.append((out, lse))
    found = ops.merge_states(*states)
    wanted = oracle.merge_states(*((out.double(), lse.double()) for out, lse in states))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)
    if all(sides):
        assert (found[0][:, BLIND] == 0).all() and (found[1][:, BLIND] == -INF).all()


@pytest.mark.parametrize("sink", SINKS, indirect=True)
@pytest.mark.parametrize("blind", ["near", "far", "both"])
def test_pod_attention(backend, blind, sink):
    q, k, v = some(40, 40)
    lead_q, lead_k, _ = some(40, 40)
    if blind == "near":
        lead_q = torch.randn_like(q)
    if blind == "far":
        q = torch.randn_like(q)
    options = {"sinks": 2, "recent": 5, "sink_logits": sink}
    found = ops.pod_attention(q, k, v, lead_q, lead_k, **options)
    wanted = oracle.pod_attention(*(x.double() for x in (q, k, v, lead_q, lead_k)), **options)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)
    if blind == "both":
        check(found, wanted, sink)


@pytest.mark.parametrize("sink", SINKS[::2], indirect=True)
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_without_attention_has_no_gradient_and_adds_to_none(backend, causal, sink):
    """Whatever it holds, and whatever comes back to it."""
    given = [x.requires_grad_() for x in some(20, 50)]
    out, lse = ops.attention(*given, causal=causal, sink_logits=sink)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), given, (dout, dlse))
    plain = [x.detach().clone() for x in given]
    plain[0][:, BLIND] = 0
    plain = [x.requires_grad_() for x in plain]
    out, lse = ops.attention(*plain, causal=causal, sink_logits=sink)
    keep = torch.ones(B, HQ, 1)
    keep[:, BLIND] = 0
    wanted = torch.autograd.grad((out, lse), plain, (dout * keep[..., None], dlse * keep))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


# ---- steps ----


def rows(held: int):
    """A table with `held` tokens in each row and room for more, and pages."""
    _, k, v = some(1, held)
    k_pages, v_pages, lines, lengths = in_pages(k, v)
    R, used = lines.shape
    more = [torch.cat([x, torch.zeros(R, P, D)]) for x in (k_pages, v_pages)]
    table = ops.PageTable(
        torch.nn.functional.pad(lines, (0, 2), value=-1), lengths,
        torch.tensor([1] * R * used + [0] * R, dtype=torch.int32),
        torch.tensor([R * used + i for i in range(R)] + [-1] * R * used, dtype=torch.int32),
        torch.tensor([R, 0], dtype=torch.int32),
    )  # fmt: skip
    return more, table


def step(name: str, module, sink):
    """The step's (out, lse) by ops or the oracle, in the dtype of what it is given."""
    exact = (lambda x: x.double()) if module is oracle else (lambda x: x)
    torch.manual_seed(3)
    held = 14
    q, k, v = some(1, 1)
    (k_pages, v_pages), table = rows(held)
    tokens = [exact(x) for x in (q, k, v)]
    pages = [exact(x) for x in (k_pages, v_pages)]
    place = torch.full((B, 1), held, dtype=torch.int32)
    if name == "paged":
        return module.paged_step_(*tokens, *pages, table, sink_logits=sink)
    if name == "quest":
        ranges = exact(torch.zeros(B * HKV, table.block_table.shape[1], 2 * D))
        return module.quest_step_(*tokens, *pages, ranges, table, pages_read=2, sink_logits=sink)[:2]
    if name == "dmc":
        tail = ops.Tail.empty(B * HKV, D)
        return module.dmc_step_(*tokens, *pages, table, tail, place, neuron=D - 1, sink_logits=sink)
    if name == "ring":
        _, k_ring, v_ring = some(1, 6)
        rings = [exact(x[0].contiguous()) for x in (k_ring, v_ring)]
        return module.ring_step_(*tokens, *rings, place, window=4, sinks=2, sink_logits=sink)
    values, value_table = rows(held)
    options = {"far": name.removeprefix("pod ")}
    if name == "pod led":
        lead = rows(held + 1)
        options["lead"] = ops.Lead(exact(some(1, 1)[0]), exact(lead[0][0]), lead[1].block_table)
    if name == "pod own":
        options |= {"far_lse": exact(torch.zeros(B, HQ, 1)), "probabilities": exact(torch.full((B, HQ, 12), 7.0))}
    found = module.pod_step_(
        *tokens, pages[0], exact(values[1]), table, value_table, place, sinks=2, recent=4, first=1, sink_logits=sink,
        **options,
    )  # fmt: skip
    if name == "pod own":
        assert (options["far_lse"][:, BLIND] == -INF).all() and (options["probabilities"][:, BLIND, :8] == 0).all()
    return found[0], found[2]


@pytest.mark.parametrize("sink", SINKS, indirect=True)
@pytest.mark.parametrize("name", ["paged", "quest", "dmc", "ring", "pod none", "pod own", "pod led"])
def test_steps(backend, name, sink):
    check(step(name, ops, sink), step(name, oracle, sink), sink)
