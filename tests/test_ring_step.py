"""A decoded step of a cache whose newest tokens lie in rings: what its parts give in turn, on every backend."""

import zlib

import oracle
import pytest
import torch
from backends import BACKENDS
from helpers import DTYPES, check_table, covering, others_of, rows_of
from test_steps import clones, close, random_table, rotation, unchanged

from kvcompress import ops
from kvcompress.ops import PageTable

SHAPES = [  # B, Hq, Hkv, D, rotary_dim
    (1, 4, 2, 16, 16),
    (3, 4, 2, 6, 4),
    (2, 6, 2, 80, 0),
    (1, 8, 2, 128, 128),
    (8, 12, 6, 8, 8),  # more heads than one block of the device serves
    (2, 2, 1, 264, 64),
]
KINDS = {  # window, sinks, options
    "window": (5, 0, {}),
    "long window": (300, 0, {}),
    "window of one": (1, 0, {}),
    "chunks": (4, 0, {"chunked": True}),
    "sinks": (5, 3, {}),
    "more sinks than window": (2, 7, {}),
    "sinks apart": (5, 3, {"apart": True}),
    "more sinks apart": (2, 7, {"apart": True}),
    "marks": (6, 0, {"marked": True}),
    "pages": (4, 0, {"marked": True, "paged": True}),
    "pages, window of one": (1, 0, {"marked": True, "paged": True}),
    "pages, own marks": (4, 0, {"marked": True, "paged": True, "own": True}),
    "pages, own marks, window of one": (1, 0, {"marked": True, "paged": True, "own": True}),
}


def new_state(kind, B, Hkv, D, dtype, places=None, P=4, room=40, device_table=random_table):
    """k_ring, v_ring, places, and what the kind of cache has besides, by name."""
    window, sinks, how = KINDS[kind]
    R, full = B * Hkv, sinks + window
    places = [0] * B if places is None else places
    state = {
        "k_ring": torch.randn(R, full, D).to(dtype), "v_ring": torch.randn(R, full, D).to(dtype),
        "places": torch.tensor(places, dtype=torch.int32)[:, None].contiguous(),
    }  # fmt: skip
    if "apart" in how:
        state |= {name: torch.randn(R, sinks, D).to(dtype) for name in ("k_far", "v_far")}
    if "marked" in how:
        state["marks"] = torch.rand(R, full) < 0.5
    if "paged" in how:
        table = device_table(B, R, P, room)
        state |= {name: torch.randn(len(table.refs), P, D).to(dtype) for name in ("k_pages", "v_pages")}
        state["table"] = table
    return state


def copy_of(state):
    return dict(zip(state, clones(list(state.values())), strict=True))


def options_of(kind, B, Hkv, D, rotary_dim):
    window, sinks, how = KINDS[kind]
    options = {"window": window, "sinks": sinks, "chunked": "chunked" in how, "own": "own" in how}
    options |= rotation(1000, rotary_dim)
    if "marked" in how:
        options |= {"neuron": D // 3, "shift": 0.1, "factor": 1.5}
    return options


def in_turn(queries, keys, values, state, *, window, sinks, chunked, own, base=None, alpha=None, neuron=None,
            factor=1.0, shift=5.0, margin=0.0, cos=None, sin=None, sink_logits=None, **softmax):  # fmt: skip
    """What ring_step_ is, by the ops of its parts, with the places known to the host."""
    B, Hkv, _, D = keys.shape
    full, places = sinks + window, state["places"].flatten().tolist()
    marks, table, k_far = state.get("marks"), state.get("table"), state.get("k_far")
    scales = {name: state[name] for name in ("key_scales", "value_scales") if name in state}

    def stored(name):
        """Arrays of the rows of that name, and how decode is told of scales."""
        codes = [state[f"{x}_{name}{end}"] for end in ("", "_scales") for x in "kv" if f"{x}_{name}{end}" in state]
        return codes, dict(zip(("key_scales", "value_scales"), codes[2:], strict=False))

    def as_stored(k, v, arrays):
        if len(arrays) == 2:
            return k, v
        pairs = [
            ops.quantize(x, "int4" if y.dtype == torch.uint8 else "int8") for x, y in ((k, arrays[0]), (v, arrays[1]))
        ]
        return [x for x, _ in pairs] + [x for _, x in pairs]

    def ints(numbers):
        return torch.tensor(numbers, dtype=torch.int32)

    def per_row(numbers):
        return ints([n for n in numbers for _ in range(Hkv)])

    def turned(x, positions):
        x = x.clone()
        if neuron is not None:
            x[..., neuron] = 0
        if cos is not None:
            x = ops.rope(x, cos, sin, positions)
        if neuron is not None:
            x[..., neuron] = 0
        return x

    positions = state["places"] if base is None else state["places"] - base
    slots = [t if t < sinks else sinks + (t - sinks) % window for t in places]
    q, k = turned(queries, positions), turned(keys, positions)
    decided = None
    if marks is not None:
        if alpha is None:
            alpha = ops.dmc_decisions(keys[..., neuron], shift=shift, scale=factor, margin=margin, hard=True).hard
        decided = alpha > 0.5
    if table is not None:
        before = torch.cat([marks.view(B, Hkv, -1), decided], 2)  # the new token's, last
        says = [t % window if own else window if window == 1 else (t + 1) % window for t in places]
        stays = [t >= window and not bool(before[b, h, says[b]]) for b, t in enumerate(places) for h in range(Hkv)]
        old = [
            torch.stack([state[name][b * Hkv : (b + 1) * Hkv, slot] for b, slot in enumerate(slots)])[:, :, None]
            for name in ("k_ring", "v_ring")
        ]
        arrays = [state["k_pages"], state["v_pages"]]
        if scales:
            pairs = [ops.quantize(x, "int4" if pages.dtype == torch.uint8 else "int8")
                     for x, pages in zip(old, arrays, strict=True)]  # fmt: skip
            arrays, old = arrays + list(scales.values()), [x for x, _ in pairs] + [x for _, x in pairs]
        ops.append_tokens_(arrays, old, table, counts=ints(stays))
    for b, (t, slot) in enumerate(zip(places, slots, strict=True)):
        rows = slice(b * Hkv, (b + 1) * Hkv)
        for x, y in zip(stored("ring")[0], as_stored(k[b, :, 0], values[b, :, 0], stored("ring")[0]), strict=True):
            x[rows, slot] = y
        if marks is not None:
            marks[rows, slot] = decided[b, :, 0] & (t > 0 or not own)
        if k_far is not None and t < sinks:
            at_zero = turned(keys[b : b + 1], torch.zeros(1, 1, dtype=torch.int32))
            arrays = stored("far")[0]
            for x, y in zip(arrays, as_stored(at_zero[0, :, 0], values[b, :, 0], arrays), strict=True):
                x[rows, t] = y
    state["places"] += 1
    far = [0] * B
    if sinks:
        far = [sinks if t >= full else 0 for t in places]
    if k_far is not None:
        far = [min(max(t + 1 - window, 0), sinks) for t in places]
    end = per_row([t % window + 1 if chunked else min(t + 1, full) for t in places])
    ring, named = stored("ring")
    near = ops.decode(q, *ring[:2], end, begin=per_row(far), sink_logits=sink_logits, **named, **softmax)
    if table is not None:
        pages = (state["k_pages"], state["v_pages"])
        held = ops.decode(q, *pages, table.lengths, block_table=table.block_table, **scales, **softmax)
        return ops.merge_states(near, held)
    if not sinks:
        return near
    place = full - 1 if k_far is None else window
    q = turned(queries, torch.full((B, 1), place, dtype=torch.int32))
    held, named = stored("ring" if k_far is None else "far")
    return ops.merge_states(near, ops.decode(q, *held[:2], per_row(far), **named, **softmax))


def same_state(found, expected, exact):
    """Pages may have other numbers; what rows hold is the same."""
    assert found.keys() == expected.keys()
    for name, x in found.items():
        y = expected[name]
        if name == "table":
            assert torch.equal(x.lengths, y.lengths) and torch.equal(x.free_count, y.free_count)
        elif name.endswith("pages") or name in ("key_scales", "value_scales"):
            rows = zip(rows_of(x, found["table"]), rows_of(y, expected["table"]), strict=True)
            for row, other in rows:
                if exact:
                    assert torch.equal(row, other)
                elif x.is_floating_point():
                    close([row.double()], [other.double()], x.dtype)
                else:  # what was rounded differently may be another code
                    assert ((row.int() - other.int()).abs() <= 1).all() or x.dtype == torch.uint8
        elif exact or x.dtype in (torch.int32, torch.bool):
            assert torch.equal(x, y), name
        elif not x.is_floating_point():  # codes, as above
            assert (x.int() - y.int()).abs().max() <= 1 or x.dtype == torch.uint8
        else:
            close([x.double()], [y.double()], x.dtype)


def tokens(B, Hq, Hkv, D, dtype):
    q = torch.randn(B, 1, Hq, D).to(dtype).transpose(1, 2)
    return q, *(torch.randn(B, 1, Hkv, D).to(dtype).transpose(1, 2) for _ in range(2))


def start_places(kind, B, seed):
    """Sequences at different places: before the ring is full, where it fills, and far on."""
    window, sinks, _ = KINDS[kind]
    some = [0, sinks + window - 1, max(sinks - 1, 0), 3 * (sinks + window) + 1]
    return [some[(b + seed) % len(some)] for b in range(B)]


@pytest.mark.parametrize(
    ("dtype", "kind", "shape", "backend"), covering(DTYPES, KINDS, SHAPES, BACKENDS), indirect=["backend"]
)
def test_a_step_is_its_parts_in_turn(backend, shape, kind, dtype):
    B, Hq, Hkv, D, rotary_dim = shape
    seed = zlib.crc32(f"{backend}{shape}{kind}{dtype}".encode()) % 3  # each kind has all three many times
    torch.manual_seed(seed)
    state = new_state(kind, B, Hkv, D, dtype, start_places(kind, B, seed))
    others = others_of(state["table"], 4) if "table" in state else None
    options = options_of(kind, B, Hkv, D, rotary_dim)
    window, sinks, how = KINDS[kind]
    if seed:
        options["base"] = (state["places"] - sinks - window).clamp(min=0)  # only what is long has one
    if seed == 2:
        options |= {"softcap": 5.0, "sink_logits": torch.randn(Hq), "scale": 0.3}
        if "marked" in how:
            options["alpha"] = torch.rand(B, Hkv, 1).round()
    ours, theirs, exact = (copy_of(state) for _ in range(3))
    exact = {name: x.double() if name != "table" and x.is_floating_point() else x for name, x in exact.items()}
    for _ in range(2):
        q, k, v = tokens(B, Hq, Hkv, D, dtype)
        out = ops.ring_step_(q, k, v, **ours, **options)
        bits = in_turn(q, k, v, theirs, **options)
        wanted = oracle.ring_step_(q.double(), k.double(), v.double(), **exact, **options)
        if backend in ("emulated", "cuda"):
            close(out, bits, dtype)
        else:
            assert all(torch.equal(x, y) for x, y in zip(out, bits, strict=True))
        close(out, wanted, dtype)
    same_state(ours, theirs, backend not in ("emulated", "cuda"))
    for name, x in ours.items():
        if name.startswith("k_") or name.startswith("v_"):
            assert x.dtype == dtype
    same_state(ours, exact, exact=False)
    if others is not None:
        check_table(ours["table"], 4, others)


@pytest.mark.parametrize("kind", ["window", "chunks", "sinks", "sinks apart", "pages"])
def test_many_steps_from_an_empty_cache(backend, kind):
    B, Hq, Hkv, D, P = 2, 4, 2, 8, 4
    empty = PageTable(
        torch.zeros(B * Hkv, 12, dtype=torch.int32), torch.zeros(B * Hkv, dtype=torch.int32),
        torch.zeros(60, dtype=torch.int32), torch.arange(60, dtype=torch.int32),
        torch.tensor([60, 0], dtype=torch.int32),
    )  # fmt: skip
    state = new_state(kind, B, Hkv, D, torch.float32, [0, 3], device_table=lambda *_: empty)
    ours, theirs, options = copy_of(state), copy_of(state), options_of(kind, B, Hkv, D, 8)
    for _ in range(30):
        new = tokens(B, Hq, Hkv, D, torch.float32)
        out = ops.ring_step_(*new, **ours, **options)
        close(out, in_turn(*new, theirs, **options), torch.float32)
    same_state(ours, theirs, exact=False)
    assert ours["places"].flatten().tolist() == [30, 33]
    if kind == "pages":
        assert 0 < int(ours["table"].lengths.min()) and int(ours["table"].lengths.max()) < 29
        check_table(ours["table"], P, torch.zeros(60, dtype=torch.int32))


def test_a_ring_that_grows_needs_only_the_slots_that_there_are(backend):
    state = new_state("long window", 2, 2, 8, torch.float32, [3, 9])
    small = copy_of(state) | {name: state[name][:, :11].clone() for name in ("k_ring", "v_ring")}
    new = tokens(2, 4, 2, 8, torch.float32)
    out, other = (ops.ring_step_(*new, **x, window=300) for x in (state, small))
    assert all(torch.equal(x, y) for x, y in zip(out, other, strict=True))
    assert torch.equal(small["k_ring"], state["k_ring"][:, :11])


def test_what_is_added_may_be_views_of_what_is_changed(backend):
    state = new_state("sinks", 2, 2, 8, torch.float32, [9, 2])
    ours, theirs = copy_of(state), copy_of(state)
    k, v = (theirs[name].view(2, 2, 8, 8)[:, :, 4:5].clone() for name in ("k_ring", "v_ring"))
    q, base = torch.randn(2, 4, 1, 8), theirs["places"].clone()
    options = {"window": 5, "sinks": 3, **rotation(20, 8)}
    views = [ours[name].view(2, 2, 8, 8)[:, :, 4:5] for name in ("k_ring", "v_ring")]
    found = ops.ring_step_(q, *views, **ours, base=ours["places"], **options)
    expected = ops.ring_step_(q, k, v, **theirs, base=base, **options)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    same_state(ours, theirs, exact=True)


# ---- refusals ----


def step(state, **options):
    q, k, v = torch.randn(1, 4, 1, 2), torch.randn(1, 2, 1, 2), torch.randn(1, 2, 1, 2)
    return ops.ring_step_(q, k, v, **state, **options)


def paged_state(free=2, blocks=3):
    """Two rows of 6 and 5 slots that share both of their pages of 4, and whose next token leaves the ring of two."""
    lines = torch.tensor([[2, 0, -1], [2, 0, -1]], dtype=torch.int32)[:, :blocks].contiguous()
    table = PageTable(
        lines, torch.tensor([6, 5], dtype=torch.int32), torch.tensor([2, 0, 2, 0], dtype=torch.int32),
        torch.tensor([1, 3, -1, -1], dtype=torch.int32), torch.tensor([free, 0], dtype=torch.int32),
    )  # fmt: skip
    return {
        "k_ring": torch.randn(2, 2, 2), "v_ring": torch.randn(2, 2, 2), "marks": torch.zeros(2, 2, dtype=torch.bool),
        "places": torch.tensor([[7]], dtype=torch.int32), "table": table, "k_pages": torch.randn(4, 4, 2),
        "v_pages": torch.randn(4, 4, 2),
    }  # fmt: skip


def ring_state(place=7, slots=4):
    return {
        "k_ring": torch.randn(2, slots, 2), "v_ring": torch.randn(2, slots, 2),
        "places": torch.tensor([[place]], dtype=torch.int32),
    }  # fmt: skip


TABLES = {"cos": torch.ones(6, 1), "sin": torch.ones(6, 1)}
MOST = 2**31 - 1
REFUSED = [
    (ring_state, {"place": -1}, {"window": 4}, "places must be between 0 and 2147483646 .* got -1 at 0"),
    (ring_state, {"place": MOST}, {"window": 4}, "places must be .* got 2147483647 at 0"),
    (ring_state, {"place": 4}, {"window": 5}, "k_ring must have room for 5 slots, got 4 for place 4"),
    (ring_state, {"place": 9}, {"window": 3, "sinks": 2}, "k_ring must have room for 5 slots, got 4 for place 9"),
    (ring_state, {"place": 9}, {"window": 5, "chunked": True}, "k_ring must have room for 5 slots, got 4"),
    (ring_state, {}, {"window": 4, **TABLES}, r"positions \(places - base\) .* between 0 and 5 .* got 7 in sequence 0"),
    (ring_state, {"place": 2}, {"window": 4, "base": torch.full((1, 1), 3, dtype=torch.int32), **TABLES}, "got -1 in"),
    (ring_state, {"place": 2, "slots": 7}, {"window": 5, "sinks": 2, **TABLES}, "cos and sin must have 7 rows"),
    (paged_state, {"free": 1}, {"window": 2, "neuron": 0, "shift": 1e5}, "free"),
]


@pytest.mark.parametrize(("made", "how", "options", "message"), REFUSED)
def test_a_refused_step_changes_nothing(cpu, made, how, options, message):
    given = made(**how)
    before = copy_of(given)
    with pytest.raises(RuntimeError, match=message):
        step(given, **options)
    assert unchanged(given.values(), before.values())


def test_a_row_that_outgrows_its_pages_is_named(cpu):
    given = paged_state(blocks=2)
    given["table"].lengths[0] = 8
    before = copy_of(given)
    with pytest.raises(RuntimeError, match="block_table must have room for 9 slots in row 0"):
        step(given, window=2, neuron=0, shift=1e5)
    assert unchanged(given.values(), before.values())


def test_a_page_that_does_not_exist_is_found_before_anything_changes(cpu):
    given = paged_state()
    given["table"].block_table[1, 0] = 4
    before = copy_of(given)
    with pytest.raises(RuntimeError, match=r"block_table must name pages between 0 and 3, got 4 at \[1, 0\]"):
        step(given, window=2, neuron=0, shift=1e5)
    assert unchanged(given.values(), before.values())


@pytest.mark.parametrize("free", [1, 2])
def test_a_device_notes_a_step_that_it_refused(cuda, free):
    given = paged_state(free=free)
    if free == 2:
        given["table"].block_table[1, 0] = 4
    before = copy_of(given)
    step(given, window=2, neuron=0, shift=1e5)
    assert given["table"].free_count.tolist() == [free, 1]
    given["table"].free_count[1] = 0
    assert unchanged(given.values(), before.values())


@pytest.mark.parametrize("place", [-1, MOST, 4])
def test_a_place_without_a_slot_is_not_written_on_a_device(cuda, place):
    given = ring_state(place)
    before = copy_of(given)
    out, lse = step(given, window=5, cos=torch.ones(9, 1), sin=torch.ones(9, 1))
    assert unchanged(given.values(), before.values())


def test_a_position_outside_the_tables_is_no_number_on_a_device(cuda):
    tables = {name: x.to(torch.get_default_device()) for name, x in TABLES.items()}
    out, lse = step(ring_state(), window=4, **tables)
    assert lse.isnan().all()


PAGED = {
    "k_pages": torch.zeros(4, 4, 2), "v_pages": torch.zeros(4, 4, 2), "marks": torch.zeros(2, 4, dtype=torch.bool),
    "table": ops.PageTable(*(torch.zeros(*shape, dtype=torch.int32) for shape in ((2, 2), (2,), (4,), (4,), (2,)))),
    "alpha": torch.zeros(1, 2, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"window": 3}, "k_ring must have at most 3 slots, got 4"),
        ({"window": 2, "sinks": -1}, "sinks must be at least 0"),
        ({"window": 4, "sinks": MOST}, "sinks must be at most"),
        ({"window": 2, "sinks": 2, "chunked": True}, "sinks must be 0 with chunks or pages, got 2"),
        ({"window": 4, "chunked": True, **PAGED}, "chunked must be False with pages, got True"),
        ({"window": 4, "base": torch.zeros(1, 1)}, "base must be torch.int32"),
        ({"window": 2, "sinks": 2, "k_far": torch.zeros(2, 2, 2)}, "k_far and v_far must be given together"),
        ({"window": 2, "sinks": 2, "k_far": torch.zeros(2, 3, 2), "v_far": torch.zeros(2, 3, 2)}, "k_far must be"),
        ({"window": 4, "marks": torch.zeros(2, 4)}, "marks must be torch.bool"),
        ({"window": 4, "marks": torch.zeros(2, 4, dtype=torch.bool)}, "marks need alpha or a neuron"),
        ({"window": 4, "alpha": torch.zeros(1, 2)}, "alpha must be"),
        ({"window": 4, "neuron": 2}, "neuron must be between -2 and 1"),
        ({"window": 4, "shift": float("nan")}, "shift must be a number"),
        ({"window": 4, "k_pages": torch.zeros(4, 4, 2)}, "k_pages, v_pages, marks and table must be given together"),
        ({"window": 4, "cos": torch.ones(9, 1)}, "cos and sin must be given together"),
        ({"window": 4, "cos": torch.ones(9, 2), "sin": torch.ones(9, 2)}, "rotate 4 dimensions"),
        ({"window": 4, "scale": float("inf")}, "scale must be finite"),
        ({"window": 4, "softcap": 0.0}, "softcap must be above 0"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    given = ring_state()
    before = copy_of(given)
    with pytest.raises((TypeError, ValueError), match=message):
        step(given, **options)
    assert unchanged(given.values(), before.values())


def test_wrong_tensors_are_named():
    for name, wrong, message in (
        ("k_ring", torch.randn(2, 4, 3), "k_ring must be"),
        ("k_ring", torch.randn(3, 4, 2), "k_ring must have B\\*Hkv rows"),
        ("v_ring", torch.randn(2, 8, 2)[:, ::2], "v_ring must be contiguous"),
        ("places", torch.zeros(1, dtype=torch.int32), "places must be"),
    ):
        with pytest.raises(ValueError, match=message):
            step(ring_state() | {name: wrong}, window=4)
    for name, wrong, message in (
        ("k_pages", torch.randn(4, 3, 2), "page size that is a power of two, got 3"),
        ("v_pages", torch.randn(4, 8, 2)[:, ::2], "v_pages must be contiguous"),
        ("marks", None, "marks and table must be given together"),
    ):
        with pytest.raises(ValueError, match=message):
            step(paged_state() | {name: wrong}, window=2, neuron=0)


def test_tensors_that_change_share_no_memory():
    given = ring_state()
    with pytest.raises(RuntimeError, match="v_ring must not share memory"):
        step(given | {"v_ring": given["k_ring"]}, window=4)


def test_a_backward_pass_is_refused():
    q, k, v = (torch.randn(1, h, 1, 2, requires_grad=True) for h in (4, 2, 2))
    out, _ = ops.ring_step_(q, k, v, **ring_state(), window=4)
    with pytest.raises(NotImplementedError, match="no gradient"):
        out.sum().backward()


def test_opcheck():
    for kind in ("sinks apart", "pages"):
        state = new_state(kind, 1, 2, 8, torch.float32, [9])
        table = state.pop("table", [None] * 5)
        options = options_of(kind, 1, 2, 8, 8)
        names = ("k_ring", "v_ring", "places", "k_far", "v_far", "marks", "k_pages", "v_pages")
        held = [state.get(name) for name in names]
        given = (*tokens(1, 4, 2, 8, torch.float32), *held, *table, None, None, options["cos"], options["sin"])
        size = options["window"], options["sinks"], False, True
        numbers = (*size, options.get("neuron", -1), 1.0, 0.0, 0.0, 0.3, None, 0.0)
        torch.library.opcheck(torch.ops.kvcompress.ring_step_.default, (*given, *numbers))
