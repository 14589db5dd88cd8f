"""A whole decoded step in one op: what its parts give in turn, on every backend."""

import oracle
import pytest
import torch
from backends import BACKENDS
from helpers import DTYPES, check_table, covering, others_of, rows_of, shared_table

from kvcompress import ops
from kvcompress.caches.formats import FORMATS
from kvcompress.ops import PageTable, Tail


def rotation(rows: int, rotary_dim: int) -> dict[str, torch.Tensor]:
    angles = torch.arange(rows)[:, None] * 100.0 ** (-torch.arange(rotary_dim // 2) / max(rotary_dim // 2, 1))
    return {"cos": angles.cos(), "sin": angles.sin()} if rotary_dim else {}


def random_table(seed: int, rows: int, page_size: int, S: int, longest: int = 30) -> PageTable:
    """Rows of any length that share pages with each other and with other tables; on the default device."""
    table = PageTable(*shared_table(seed, rows, page_size, longest, 3 * rows + rows * S // page_size))
    # pages of rows that shared the longest line end before its free columns do
    return table._replace(block_table=torch.nn.functional.pad(table.block_table, (0, S // page_size + 1), value=-7))


def clones(state):
    return [[x.clone() for x in part] if isinstance(part, list) else type(part)(*(x.clone() for x in part)) if
            isinstance(part, tuple) else part.clone() for part in state]  # fmt: skip


def in_turn(queries, keys, values, pages, table, *, shift=None, begin=None, cos=None, sin=None, **softmax):
    """What paged_step_ is, by the ops of its parts."""
    B, _, S, _ = queries.shape
    first = table.lengths if shift is None else table.lengths + shift
    positions = (first.view(B, -1)[:, :1] + torch.arange(S, dtype=torch.int32)).contiguous()
    if cos is not None:
        queries, keys = (ops.rope(x, cos, sin, positions) for x in (queries, keys))
    ops.append_tokens_(pages, [keys, values], table)
    return ops.decode(
        queries, *pages, table.lengths, block_table=table.block_table, begin=begin, causal=True, **softmax
    )


def same_rows(found, expected, exact: bool) -> None:
    """Pages may have other numbers; what rows hold is the same. found, expected: (pages, table)."""
    assert torch.equal(found[1].lengths, expected[1].lengths)
    assert torch.equal(found[1].free_count, expected[1].free_count)
    for x, y in zip(found[0], expected[0], strict=True):
        for row, other in zip(rows_of(x, found[1]), rows_of(y, expected[1]), strict=True):
            if exact:
                assert torch.equal(row, other)
            else:
                close([row.double()], [other.double()], x.dtype)  # numbers that cancel lose more than a rounding


def close(found, expected, dtype: torch.dtype) -> None:
    eps = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=eps, atol=eps)


SHAPES = [  # B, Hq, Hkv, S, D, rotary_dim, page_size
    (1, 4, 2, 1, 16, 16, 4),
    (3, 4, 2, 1, 6, 4, 2),
    (2, 2, 2, 3, 33, 8, 1),
    (2, 6, 2, 5, 80, 0, 16),
    (1, 32, 8, 1, 128, 128, 64),
    (4, 32, 8, 1, 64, 64, 16),
    (3, 28, 4, 2, 40, 40, 8),
    (1, 2, 1, 1, 512, 128, 4),
    (1, 1, 1, 40, 8, 8, 1),  # a row that takes more pages than a warp has lanes
    (1, 2, 2, 16, 256, 64, 4),  # new tokens that are more than one block lays ready
]


@pytest.mark.parametrize(("dtype", "shape", "backend"), covering(DTYPES, SHAPES, BACKENDS), indirect=["backend"])
def test_a_step_is_its_parts_in_turn(backend, shape, dtype):
    B, Hq, Hkv, S, D, rotary_dim, P = shape
    for seed in range(3):
        torch.manual_seed(seed)
        table = random_table(seed, B * Hkv, P, S)
        others = others_of(table, P)
        pages = [torch.randn(len(table.refs), P, D).to(dtype) for _ in range(2)]
        q = torch.randn(B, S, Hq, D).to(dtype).transpose(1, 2)
        k, v = (torch.randn(B, S, Hkv, D).to(dtype).transpose(1, 2) for _ in range(2))
        options = rotation(90, rotary_dim)
        if seed:  # the places of a sequence's rows are the same, whatever their lengths
            places = torch.full((B, 1), 40, dtype=torch.int32) + torch.arange(B, dtype=torch.int32)[:, None]
            options["shift"] = (places - table.lengths.view(B, Hkv)).flatten()
            options["begin"] = (table.lengths * 0.4).to(torch.int32)
        if seed == 2:
            options |= {"softcap": 5.0, "sink_logits": torch.randn(Hq), "scale": 0.3}
        ours, theirs, exact = (clones((pages, table)) for _ in range(3))
        out = ops.paged_step_(q, k, v, *ours[0], ours[1], **options)
        bits = in_turn(q, k, v, *theirs, **options)
        exact[0] = [x.double() for x in exact[0]]
        wanted = oracle.paged_step_(q.double(), k.double(), v.double(), *exact[0], exact[1], **options)
        if backend in ("emulated", "cuda"):
            close(out, bits, dtype)
        else:
            assert all(torch.equal(x, y) for x, y in zip(out, bits, strict=True))
        close(out, wanted, dtype)
        same_rows(ours, theirs, backend not in ("emulated", "cuda"))
        same_rows(ours, exact, exact=False)
        check_table(ours[1], P, others)


@pytest.mark.parametrize("B", [40, 50])
def test_a_step_of_many_rows_is_its_parts_in_turn(cuda, B):
    """320 rows, which the first block knows one by one, and 400, which it does not."""
    table = random_table(B, B * 8, 4, 1)
    pages = [torch.randn(len(table.refs), 4, 8) for _ in range(2)]
    q, k, v = (torch.randn(B, 8, 1, 8) for _ in range(3))
    ours, theirs = (clones((pages, table)) for _ in range(2))
    out = ops.paged_step_(q, k, v, *ours[0], ours[1])
    close(out, in_turn(q, k, v, *theirs), torch.float32)
    same_rows(ours, theirs, exact=True)


@pytest.mark.parametrize(
    ("dtype", "window", "shape", "backend"),
    covering(DTYPES, [None, 3], [s for s in SHAPES if s[3] == 1], BACKENDS),
    indirect=["backend"],
)
def test_a_step_of_dmc_is_its_parts_in_turn(backend, shape, window, dtype):
    B, Hq, Hkv, _, D, rotary_dim, P = shape
    for seed in range(3):
        torch.manual_seed(seed)
        table = random_table(seed, B * Hkv, P, 1)
        others, R, N, neuron = others_of(table, P), B * Hkv, window or 1, D // 2
        tail = Tail(torch.randn(R, N, D), torch.randn(R, N, D), 0.1 + torch.rand(R, N), torch.randint(0, 9, (R,)).int())
        tail.counts[table.lengths == 0] = 0
        tail.keys[..., neuron] = 0
        places = torch.randint(0, 50, (B, 1), dtype=torch.int32)
        pages = [torch.randn(len(table.refs), P, D).to(dtype) for _ in range(2)]
        q = torch.randn(B, 1, Hq, D).to(dtype).transpose(1, 2)
        k, v = (torch.randn(B, 1, Hkv, D).to(dtype).transpose(1, 2) for _ in range(2))
        options = rotation(90, rotary_dim) | {"neuron": neuron, "window": window, "shift": 0.1, "omega_shift": 1.0}
        if seed:
            options |= {
                "offsets": torch.randint(0, 30, (B, 1), dtype=torch.int32),
                "reduce": "mean_sigmoid",
                "eps": 0.1,
            }
        if seed == 2:
            options |= {"alpha": torch.rand(B, Hkv, 1).round(), "omega": 0.1 + torch.rand(B, Hkv, 1), "softcap": 5.0}
            options |= {"sink_logits": torch.randn(Hq)}
        ours, theirs = (clones((pages, table, tail, places)) for _ in range(2))
        out = ops.dmc_step_(q, k, v, *ours[0], *ours[1:], **options)
        theirs[0] = [x.double() for x in theirs[0]]
        wanted = oracle.dmc_step_(q.double(), k.double(), v.double(), *theirs[0], *theirs[1:], **options)
        close(out, wanted, dtype)
        same_rows(ours, theirs, exact=False)
        assert torch.equal(ours[2].counts, theirs[2].counts) and torch.equal(ours[3], places + 1)
        check_table(ours[1], P, others)


@pytest.mark.parametrize(("dtype", "format"), covering(DTYPES, [None, *FORMATS]))
def test_a_step_of_dmc_has_the_bits_of_its_parts(cpu, dtype, format):
    check_bits_of_dmc(dtype, format, 40)


@pytest.mark.parametrize(
    ("dtype", "format", "D", "backend"),
    covering(DTYPES, FORMATS, [16, 40, 128, 256, 512], BACKENDS),
    indirect=["backend"],
)
def test_a_step_of_dmc_over_codes_is_its_parts_in_turn(backend, dtype, format, D):
    check_bits_of_dmc(dtype, format, D)


def check_bits_of_dmc(dtype, format, D):
    B, Hq, Hkv, P, neuron = 2, 8, 2, 4, D - 1
    table = random_table(1, B * Hkv, P, 20)
    tail, places = Tail.empty(B * Hkv, D), torch.tensor([[3], [17]], dtype=torch.int32)
    pages, scales = [torch.randn(len(table.refs), P, D).to(dtype) for _ in range(2)], []
    if format is not None:
        stored = [ops.quantize(x, code) for x, code in zip(pages, FORMATS[format], strict=True)]
        pages, scales = [x for x, _ in stored], [x for _, x in stored]
    turns = rotation(90, 40 if D > 40 else D)
    ours, theirs = (clones((pages, table, tail, places, scales)) for _ in range(2))
    names = ("key_scales", "value_scales")
    our_scales, their_scales = (dict(zip(names, state.pop(), strict=False)) for state in (ours, theirs))
    for _ in range(20):
        q = torch.randn(B, Hq, 1, D).to(dtype)
        k, v = (torch.randn(B, Hkv, 1, D).to(dtype) for _ in range(2))
        found = ops.dmc_step_(q, k, v, *ours[0], *ours[1:], neuron=neuron, shift=-0.5, **turns, **our_scales)
        alpha = ops.dmc_decisions(k[..., neuron], shift=-0.5, hard=True).hard
        omega = ops.dmc_importance(q[..., neuron], Hkv)
        q = q.clone()
        q[..., neuron] = 0
        q = ops.rope(q, **turns, positions=theirs[3])
        q[..., neuron] = 0
        options = turns | their_scales | {"positions": theirs[3], "neuron": neuron}
        ops.dmc_append_(*theirs[0], *theirs[1:3], k, v, alpha, omega, **options)
        theirs[3] += 1
        expected = ops.decode(q, *theirs[0], theirs[1].lengths, block_table=theirs[1].block_table, **their_scales)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    same_rows(ours[:2], theirs[:2], exact=True)


def test_what_is_added_may_be_views_of_what_is_changed(backend):
    B, D, P = 2, 8, 4
    table = random_table(5, B, P, 1)
    pages = [torch.randn(len(table.refs), P, D) for _ in range(2)]
    ours, theirs = clones((pages, table)), clones((pages, table))

    def views(state):
        free = state[1].free_pages[int(state[1].free_count[0]) - B :][:B].long()
        return state[0][0][int(free.min())][:B, None, None], state[0][1][int(free.min())][:B, None, None]

    q = torch.randn(B, 2, 1, D)
    found = ops.paged_step_(q, *views(ours), *ours[0], ours[1], shift=ours[1].lengths)
    copies = [x.clone() for x in (*views(theirs), theirs[1].lengths)]
    expected = ops.paged_step_(q, *copies[:2], *theirs[0], theirs[1], shift=copies[2])
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    same_rows(ours, theirs, exact=True)


# ---- refusals ----


def state(free: int = 2):
    """Two rows of 6 and 5 slots that share both of their pages of 4."""
    table = PageTable(
        torch.tensor([[2, 0, -1], [2, 0, -1]], dtype=torch.int32),
        torch.tensor([6, 5], dtype=torch.int32),
        torch.tensor([2, 0, 2, 0], dtype=torch.int32),
        torch.tensor([1, 3, -1, -1], dtype=torch.int32),
        torch.tensor([free, 0], dtype=torch.int32),
    )
    tail = Tail(torch.randn(2, 1, 2), torch.randn(2, 1, 2), torch.ones(2, 1), torch.ones(2, dtype=torch.int32))
    return [[torch.randn(4, 4, 2) for _ in range(2)], table, tail, torch.tensor([[6]], dtype=torch.int32)]


def paged(given, S=1, **options):
    q, k, v = torch.randn(1, 4, S, 2), torch.randn(1, 2, S, 2), torch.randn(1, 2, S, 2)
    return ops.paged_step_(q, k, v, *given[0], given[1], **options)


def dmc(given, **options):
    q, k, v = torch.randn(1, 4, 1, 2), torch.randn(1, 2, 1, 2), torch.randn(1, 2, 1, 2)
    return ops.dmc_step_(q, k, v, *given[0], *given[1:], **({"neuron": -1} | options))


def unchanged(given, before) -> bool:
    parts = [x for part in given for x in (part if isinstance(part, (list, tuple)) else [part])]
    olds = [x for part in before for x in (part if isinstance(part, (list, tuple)) else [part])]
    return all(torch.equal(x, y) for x, y in zip(parts, olds, strict=True))


REFUSED = [
    (paged, {"free": 1}, {}, "free"),
    (paged, {}, {"S": 7}, "block_table must have room for 13 slots in row 0"),
    (paged, {}, {"cos": torch.ones(6, 1), "sin": torch.ones(6, 1)}, "positions .* between 0 and 5 .* got 6 in"),
    (paged, {}, {"begin": torch.tensor([0, 7], dtype=torch.int32)}, "begin must be between 0 and 6 .* got 7 at 1"),
    (dmc, {"free": 1}, {"shift": 1e5}, "free"),
    (dmc, {}, {"cos": torch.ones(6, 1), "sin": torch.ones(6, 1)}, "positions .* between 0 and 5 .* got 6 in"),
]


@pytest.mark.parametrize(("step", "how", "options", "message"), REFUSED)
def test_a_refused_step_changes_nothing(cpu, step, how, options, message):
    given = state(**how)
    before = clones(given)
    with pytest.raises(RuntimeError, match=message):
        step(given, **options)
    assert unchanged(given, before)


CORRUPT = [  # (row, block) of state's table, and what it names; of row 0 the first row's last page, else an earlier one
    ((0, 0), 4), ((1, 0), -1), ((0, 1), 7), ((1, 0), -(2**31)), ((1, 0), 2**31 - 1),
]  # fmt: skip


@pytest.mark.parametrize("step", [paged, dmc])
@pytest.mark.parametrize(("place", "page"), CORRUPT)
def test_a_page_that_does_not_exist_is_found_before_anything_changes(cpu, step, place, page):
    given = state()
    given[1].block_table[place] = page
    before = clones(given)
    with pytest.raises(RuntimeError, match=rf"pages between 0 and 3, got {page} at \[{place[0]}, {place[1]}\]"):
        step(given)
    assert unchanged(given, before)


def test_a_page_before_begin_may_be_any_number(backend):
    given = state()
    given[1].block_table[:, 0] = 9
    out, _ = paged(given, begin=torch.tensor([4, 4], dtype=torch.int32))
    assert out.isfinite().all() and given[1].lengths.tolist() == [7, 6] and given[1].free_count.tolist() == [1, 0]


def no_free_page(given):
    given[1].free_count[0] = 1


def free_page_outside(given):
    given[1].free_pages[1] = 4


def page_outside(given):
    given[1].block_table[1, 0] = 4


@pytest.mark.parametrize("step", [paged, dmc])
@pytest.mark.parametrize("spoil", [no_free_page, free_page_outside, page_outside])
def test_a_device_notes_a_step_that_it_refused(cuda, step, spoil):
    given = state()
    spoil(given)
    before = clones(given)
    step(given, **({} if step is paged else {"shift": 1e5}))
    assert given[1].free_count.tolist() == [before[1].free_count[0], 1]
    given[1].free_count[1] = 0
    assert unchanged(given, before)


@pytest.mark.parametrize("step", [paged, dmc])
def test_a_position_outside_the_tables_is_no_number_on_a_device(cuda, step):
    given = state()
    out, lse = step(given, cos=torch.ones(6, 1), sin=torch.ones(6, 1))
    assert lse.isnan().all()


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (paged, {"shift": torch.zeros(3, dtype=torch.int32)}, "shift must have shape"),
        (paged, {"begin": torch.zeros(2)}, "begin must be int32"),
        (paged, {"cos": torch.ones(9, 1)}, "cos and sin must be given together"),
        (paged, {"cos": torch.ones(9, 2), "sin": torch.ones(9, 2)}, "rotate 4 dimensions"),
        (paged, {"scale": float("inf")}, "scale must be finite"),
        (paged, {"softcap": 0.0}, "softcap must be above 0"),
        (dmc, {"neuron": 2}, "neuron must be between -2 and 1"),
        (dmc, {"window": 65}, "window must be at most 64"),
        (dmc, {"window": 2}, "tail.keys must be"),
        (dmc, {"reduce": "sum"}, "reduce must be one of"),
        (dmc, {"alpha": torch.ones(1, 2, 2)}, "alpha must be"),
        (dmc, {"offsets": torch.zeros(1, 1)}, "offsets must be"),
        (dmc, {"shift": float("nan")}, "shift must be"),
        (dmc, {"eps": -1.0}, "eps must be"),
    ],
)
def test_wrong_arguments_are_named(step, options, message):
    given = state()
    before = clones(given)
    with pytest.raises(ValueError, match=message):
        step(given, **options)
    assert unchanged(given, before)


@pytest.mark.parametrize("step", [paged, dmc])
def test_wrong_tensors_are_named(step):
    given = state()
    given[0][0] = torch.randn(4, 4, 3)
    with pytest.raises(ValueError, match="k_pages must be"):
        step(given)
    given = state()
    given[0] = [torch.randn(4, 8, 2)[:, ::2] for _ in range(2)]
    with pytest.raises(ValueError, match="k_pages must be contiguous"):
        step(given)
    given = state()
    given[0] = [torch.randn(4, 3, 2) for _ in range(2)]
    with pytest.raises(ValueError, match="page size that is a power of two, got 3"):
        step(given)


@pytest.mark.parametrize("step", [paged, dmc])
def test_a_backward_pass_is_refused(step):
    given = state()
    for x in given[0]:
        x.requires_grad_(False)
    q, k, v = (torch.randn(1, h, 1, 2, requires_grad=True) for h in (4, 2, 2))
    if step is paged:
        out, _ = ops.paged_step_(q, k, v, *given[0], given[1])
    else:
        out, _ = ops.dmc_step_(q, k, v, *given[0], *given[1:], neuron=0)
    with pytest.raises(NotImplementedError, match="no gradient"):
        out.sum().backward()
