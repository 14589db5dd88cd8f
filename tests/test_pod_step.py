"""A decoded step of PoD: what its parts give in turn, on every backend, and what it refuses."""

import oracle
import pytest
import torch
from backends import BACKENDS
from helpers import DTYPES, check_table, covering
from test_steps import clones, close, rotation, same_rows, state, unchanged

from kvcompress import ops
from kvcompress.caches.formats import FORMATS
from kvcompress.ops import PageTable

POD = [  # B, Hq, Hkv, D, page_size, sinks, recent, tokens before, of which pages are gone
    (1, 4, 2, 16, 4, 2, 6, 30, True),
    (3, 4, 2, 6, 2, 0, 5, 17, True),
    (2, 2, 2, 33, 1, 3, 4, 9, False),
    (2, 6, 2, 80, 16, 5, 40, 70, True),
    (1, 4, 2, 16, 4, 4, 60, 20, False),  # nothing is distant
    (2, 8, 2, 128, 8, 4, 16, 0, False),
]


def window_rows(rows: int, held: int, page_size: int, D: int, dtype: torch.dtype):
    """Pages in random order and their table, of rows of `held` slots each."""
    blocks = -(-held // page_size) + 2
    pages = torch.randn(rows * blocks + 3, page_size, D).to(dtype)
    order, used = torch.randperm(len(pages)).to(torch.int32), -(-held // page_size)
    lines = torch.full((rows, blocks), -7, dtype=torch.int32)
    lines[:, :used] = order[: rows * used].view(rows, used)
    refs, free = torch.zeros(len(pages), dtype=torch.int32), order[rows * used :]
    refs[order[: rows * used].long()] = 1
    spare = torch.full((len(pages),), -9, dtype=torch.int32)
    spare[: len(free)] = free
    count = torch.tensor([len(free), 0], dtype=torch.int32)
    return pages, PageTable(lines, torch.full((rows,), held, dtype=torch.int32), refs, spare, count)


@pytest.mark.parametrize(("dtype", "shape", "backend"), covering(DTYPES, POD, BACKENDS), indirect=["backend"])
def test_a_step_of_pod_is_its_parts_in_turn(backend, shape, dtype):
    B, Hq, Hkv, D, P, sinks, recent, seen, gone = shape
    R, first = B * Hkv, -(-sinks // P)
    dropped = max((seen - recent + 1) // P - first, 0) if gone else 0
    turns = rotation(90, D // 4 * 2)
    for far in ("none", "own", "led", "shared"):
        keys, table = window_rows(R, seen - dropped * P, P, D, dtype)
        values, value_table = window_rows(R, seen, P, D, dtype)
        places = torch.full((B, 1), seen, dtype=torch.int32)
        q, k, v = (torch.randn(B, 1, H, D).to(dtype).transpose(1, 2) for H in (Hq, Hkv, Hkv))
        columns = max(seen + 1 - sinks - recent, 0) + 2
        options = {"sinks": sinks, "recent": recent, "first": first, "far": far, **turns}
        options["moved"] = torch.full((R,), dropped, dtype=torch.int32) if dropped else None
        if far == "own":  # its keys are all there
            keys, table = window_rows(R, seen, P, D, dtype)
            options["moved"] = None
            options |= {"probabilities": torch.full((B, Hq, columns), 7.0), "far_lse": torch.zeros(B, Hq, 1)}
        elif far == "shared":
            options |= {"probabilities": torch.rand(B, Hq, columns), "far_lse": torch.randn(B, Hq, 1), "tau": 0.5}
        elif far == "led":
            theirs, their_table = window_rows(R, seen + 1, P, D, dtype)
            options["lead"] = ops.Lead(torch.randn(B, Hq, 1, D).to(dtype), theirs, their_table.block_table)
        if far != "none":
            options |= {"softcap": 5.0, "sink_logits": torch.randn(Hq), "scale": 0.3}
        ours = clones(([keys], [values], table, value_table, places))
        theirs_too = clones(([keys.double()], [values.double()], table, value_table, places))
        given, wanted = ({name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
                         for _ in range(2))  # fmt: skip
        if far == "led":
            lead = options["lead"]
            wanted["lead"] = ops.Lead(lead.queries.double(), lead.k_pages.double(), lead.block_table)
        elif far != "none":
            wanted |= {name: options[name].double() for name in ("probabilities", "far_lse")}
        found = ops.pod_step_(q, k, v, ours[0][0], ours[1][0], *ours[2:], **given)
        exact = oracle.pod_step_(
            q.double(), k.double(), v.double(), theirs_too[0][0], theirs_too[1][0], *theirs_too[2:], **wanted
        )
        close(found[:2], exact[:2], dtype)
        if far == "shared":
            assert torch.equal(found.skipped, exact[3])
        else:
            close([found.lse], [exact[2]], dtype)
        if far == "own":
            here = columns - 2
            close([given["far_lse"]], [wanted["far_lse"]], dtype)
            close([given["probabilities"][..., :here]], [wanted["probabilities"][..., :here]], dtype)
            assert (given["probabilities"][..., here:] == 7).all()
        for i, of in ((0, 2), (1, 3)):
            same_rows((ours[i], ours[of]), (theirs_too[i], theirs_too[of]), exact=False)
            check_table(ours[of], P, torch.zeros_like(ours[of].refs))
        assert torch.equal(ours[4], places + 1)


def in_turn(
    q, k, v, keys, values, table, value_table, places, format, *, sinks, recent, first, far, moved=None,
    probabilities=None, far_lse=None, lead=None, tau=None, cos=None, sin=None, sink_logits=None, **softmax,
):  # fmt: skip
    """(out, lse or skipped) of pod_step_ over codes, by the ops of its parts. keys, values: pages and scales."""
    if cos is not None:
        q, k = (ops.rope(x, cos, sin, places) for x in (q, k))
    for x, stored, of, code in zip((k, v), (keys, values), (table, value_table), FORMATS[format], strict=True):
        ops.append_tokens_(stored, ops.quantize(x, code), of)
    places += 1
    place = torch.arange(table.block_table.shape[1])
    place = place + torch.where(place < first, 0, 0 if moved is None else moved[:, None])
    near_table = value_table.block_table.gather(
        1, place.expand(len(table.lengths), -1).clamp(0, value_table.block_table.shape[1] - 1)
    )
    near = ops.decode(
        q, keys[0], values[0], table.lengths, begin=(table.lengths - recent).clamp(min=0), sinks=sinks,
        block_table=table.block_table, value_table=near_table, sink_logits=sink_logits, key_scales=keys[1],
        value_scales=values[1], **softmax,
    )  # fmt: skip
    begin = value_table.lengths.clamp(max=sinks)
    end, there = torch.maximum(value_table.lengths - recent, begin), value_table.block_table
    if far == "none":
        return near
    if far == "shared":
        options = {"block_table": there, "tau": tau, "value_scales": values[1]}
        return ops.decode_shared(near, probabilities, far_lse, values[0], begin, end, **options)
    queries, theirs, lines, scales = lead or (q, keys[0], table.block_table, keys[1])
    distant = ops.decode(
        queries, theirs, values[0], end, begin=begin, block_table=lines, value_table=there,
        probabilities=probabilities, key_scales=scales, value_scales=values[1], **softmax,
    )  # fmt: skip
    if far == "own":
        far_lse.copy_(distant[1])
    return ops.merge_states(near, distant)


@pytest.mark.parametrize(
    ("format", "far", "dtype", "shape", "backend"),
    covering(FORMATS, ["none", "own", "led", "shared"], DTYPES, [x for x in POD if x[3] % 2 == 0], BACKENDS),
    indirect=["backend"],
)
def test_a_step_of_pod_over_codes_is_its_parts_in_turn(backend, format, far, dtype, shape):
    B, Hq, Hkv, D, P, sinks, recent, seen, gone = shape
    R, first = B * Hkv, -(-sinks // P)
    dropped = max((seen - recent + 1) // P - first, 0) if gone and far != "own" else 0

    def coded(held, code):
        pages, table = window_rows(R, held, P, D, dtype)
        return list(ops.quantize(pages, code)), table

    of_keys, of_values = FORMATS[format]
    keys, table = coded(seen - dropped * P, of_keys)
    values, value_table = coded(seen, of_values)
    columns = max(seen + 1 - sinks - recent, 0) + 2
    options = {"sinks": sinks, "recent": recent, "first": first, "far": far, **rotation(90, D // 4 * 2)}
    options["moved"] = torch.full((R,), dropped, dtype=torch.int32) if dropped else None
    if far == "own":
        options |= {"probabilities": torch.full((B, Hq, columns), 7.0), "far_lse": torch.zeros(B, Hq, 1)}
    elif far == "shared":
        options |= {"probabilities": torch.rand(B, Hq, columns), "far_lse": torch.randn(B, Hq, 1), "tau": 0.5}
    elif far == "led":
        (theirs, scales), their_table = coded(seen + 1, of_keys)
        options["lead"] = ops.Lead(torch.randn(B, Hq, 1, D).to(dtype), theirs, their_table.block_table, scales)
    if far != "none":
        options |= {"softcap": 5.0, "sink_logits": torch.randn(Hq), "scale": 0.3}
    q, k, v = (torch.randn(B, H, 1, D).to(dtype) for H in (Hq, Hkv, Hkv))
    ours, theirs = (clones((keys, values, table, value_table, torch.full((B, 1), seen).int())) for _ in range(2))
    given, wanted = ({name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
                     for _ in range(2))  # fmt: skip
    scales = {"key_scales": ours[0][1], "value_scales": ours[1][1]}
    found = ops.pod_step_(q, k, v, ours[0][0], ours[1][0], *ours[2:], **given, **scales)
    out, other = in_turn(q, k, v, *theirs, format, **wanted)
    assert torch.equal(found.out, out)
    assert torch.equal(found.skipped if far == "shared" else found.lse, other)
    assert far != "own" or all(torch.equal(given[name], wanted[name]) for name in ("probabilities", "far_lse"))
    for i, of in ((0, 2), (1, 3)):
        same_rows((ours[i], ours[of]), (theirs[i], theirs[of]), exact=True)
        check_table(ours[of], P, torch.zeros_like(ours[of].refs))
    assert torch.equal(ours[4], theirs[4])


def pod(given, **options):
    """The keys' table is as state gives it, the values' has one page less where `short`."""
    q, k, v = torch.randn(1, 4, 1, 2), torch.randn(1, 2, 1, 2), torch.randn(1, 2, 1, 2)
    (pages, values), table, value_table, places = given
    return ops.pod_step_(
        q, k, v, pages, values, table, value_table, places, **({"sinks": 1, "recent": 3, "first": 1} | options)
    )


def pod_state(free: int = 2):
    pages, table, _, places = state()
    return [pages, table, PageTable(*(x.clone() for x in state(free)[1])), places]


def far_options(far: str) -> dict:
    """What pod needs besides, for the two distant tokens that its rows have."""
    options = {"far": far}
    if far in ("own", "shared"):
        options |= {"probabilities": torch.zeros(1, 4, 3), "far_lse": torch.zeros(1, 4, 1)}
    if far == "led":
        options["lead"] = ops.Lead(torch.randn(1, 4, 1, 2), torch.randn(4, 4, 2), pod_state()[1].block_table)
    return options


def spoil(given, options, what: str) -> None:
    """Makes one index of a step of PoD wrong."""
    _, table, value_table, _ = given
    if what == "key":
        table.block_table[1, 0] = 4
    elif what == "value":
        value_table.block_table[1, 0] = -1
    elif what == "free value":
        value_table.free_pages[1] = 4
    elif what == "moved":
        options["moved"] = torch.tensor([0, 1], dtype=torch.int32)
    elif what == "columns":
        options["probabilities"] = torch.zeros(1, 4, 1)
    elif what == "lead":
        lines = options["lead"].block_table.clone()
        lines[1, 0] = 4
        options["lead"] = options["lead"]._replace(block_table=lines)
    elif what == "short lead":
        options["lead"] = options["lead"]._replace(block_table=options["lead"].block_table[:, :0])
    elif what == "short keys":
        table.lengths[0] = 1


SPOILT = [
    ("none", "key", r"pod_step_: block_table must name pages between 0 and 3, got 4 at \[1, 0\]"),
    ("none", "value", r"value_table: block_table must name pages between 0 and 3, got -1 at \[1, 0\]"),
    ("none", "free value", r"value_table: free_pages must be between 0 and 3 \(last page\), got 4 at 1"),
    ("none", "moved", "moved must lead from page 1 of the keys of row 1 to one of the 2 pages of its values, got 1"),
    ("own", "key", "block_table must name"),
    ("own", "columns", "probabilities must have a column for each of 3 distant tokens of row 0, got 1"),
    ("own", "short keys", "lengths must be at least 3 for the distant keys of row 0, got 1"),
    ("led", "value", "value_table: block_table must name"),
    ("led", "lead", r"lead.block_table must name pages between 0 and 3, got 4 at \[1, 0\]"),
    ("led", "short lead", "lead.block_table must hold 4 slots in row 0, got 0 pages of 4"),
    ("shared", "value", "value_table: block_table must name"),
    ("shared", "columns", "probabilities must have a column for each of 3 distant tokens of row 0, got 1"),
]


@pytest.mark.parametrize(("far", "what", "message"), SPOILT)
def test_an_index_of_a_step_of_pod_is_looked_at_before_anything_changes(cpu, far, what, message):
    given, options = pod_state(), far_options(far)
    spoil(given, options, what)
    before = clones(given)
    with pytest.raises(RuntimeError, match=message):
        pod(given, **options)
    assert unchanged(given, before)


@pytest.mark.parametrize("far", ["none", "own", "led", "shared"])
def test_a_step_of_pod_whose_values_find_no_page_changes_nothing(cpu, far):
    given = pod_state(free=1)
    before = clones(given)
    with pytest.raises(RuntimeError, match="free"):
        pod(given, **far_options(far))
    assert unchanged(given, before)


@pytest.mark.parametrize("what", ["key", "value", "free value", "no free value"])
def test_a_device_notes_a_step_of_pod_that_it_refused(cuda, what):
    given = pod_state(free=1 if what == "no free value" else 2)
    spoil(given, {}, what)
    before = clones(given)
    pod(given)
    for table, old in zip(given[1:3], before[1:3], strict=True):
        assert table.free_count.tolist() == [old.free_count[0], 1]
        table.free_count[1] = 0
    assert unchanged(given, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"far": "near"}, "far must be one of none, own, led, shared, got 'near'"),
        ({"far": "own"}, "far_lse must be given"),
        ({"far": "shared", "far_lse": torch.zeros(1, 4, 1)}, "far_lse and probabilities must be given"),
        (  # they are written: a copy would be lost
            {"far": "own", "far_lse": torch.zeros(1, 4, 1), "probabilities": torch.zeros(1, 4, 8)[..., ::2]},
            "probabilities and far_lse must be contiguous",
        ),
        ({"recent": 0}, "recent must be at least 1"),
        ({"sinks": -1}, "sinks must be at least 0"),
        ({"moved": torch.zeros(3, dtype=torch.int32)}, "moved must be"),
        ({"tau": 1.5}, "tau must be a number between 0 and 1, got 1.5"),
        ({"cos": torch.ones(9, 1)}, "cos and sin must be given together"),
    ],
)
def test_wrong_arguments_of_a_step_of_pod_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        pod(pod_state(), **options)
    with pytest.raises(TypeError, match=r"lead must be an ops.Lead"):
        pod(pod_state(), far="led")


def test_a_step_of_pod_outside_the_tables_changes_nothing(cpu):
    given = pod_state()
    before = clones(given)
    with pytest.raises(RuntimeError, match=r"places must be between 0 and 5 \(last row of cos and sin\), got 6"):
        pod(given, cos=torch.ones(6, 1), sin=torch.ones(6, 1))
    assert unchanged(given, before)
