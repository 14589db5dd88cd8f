"""A decoded step that reads only the pages that may matter to it: what its parts give in turn, on every backend."""

import oracle
import pytest
import torch
from backends import BACKENDS
from helpers import DTYPES, check_table, covering, others_of, rows_of
from oracle.quest_step import choose
from test_steps import clones, close, random_table, rotation, same_rows, state, unchanged

from kvcompress import ops

SHAPES = [  # B, Hq, Hkv, D, rotary_dim, page_size, pages_read, longest row
    (1, 4, 2, 16, 16, 4, 3, 30),
    (3, 4, 2, 6, 4, 2, 5, 30),
    (2, 2, 2, 33, 8, 1, 1, 30),
    (1, 6, 2, 80, 0, 1, 40, 400),  # several stretches of pages
    (1, 26, 2, 128, 128, 8, 4, 90),  # more query heads than are multiplied at once
    (8, 24, 2, 8, 8, 2, 4, 30),  # more heads than one block of the device serves
    (1, 2, 1, 512, 128, 4, 2, 30),
    (2, 4, 2, 16, 16, 4, 99, 30),  # every page is read
    (1, 4, 2, 16, 16, 16, 70, 1300),  # more slots than one piece of decode
]


def ranges_of(k_pages, table, capacity):
    """Ranges of all pages that the rows hold; what lies behind them is no number."""
    P, D = k_pages.shape[1:]
    ranges = torch.full((len(table.lengths), capacity, 2 * D), float("nan"), dtype=k_pages.dtype)
    for r, length in enumerate(table.lengths.tolist()):
        for i in range(-(-length // P)):
            keys = k_pages[table.block_table[r, i], : length - i * P]
            ranges[r, i] = torch.cat([keys.amax(0), (-keys).amax(0)])
    return ranges


def new_state(shape, seed, dtype):
    """queries, keys, values; pages, ranges, table."""
    B, Hq, Hkv, D, _, P, _, longest = shape
    torch.manual_seed(seed)
    table = random_table(seed, B * Hkv, P, 1, longest)
    if seed:  # rows of a sequence are of one length, as those of a cache are; the first one is a page's first token
        length = min(int(table.lengths.min()), longest) // P * P + (seed - 1) * (P // 2)
        ops.truncate_rows_(table, table.lengths.clamp(max=length), P)
    pages = [torch.randn(len(table.refs), P, D).to(dtype) for _ in range(2)]
    tokens = [torch.randn(B, 1, H, D).to(dtype).transpose(1, 2) for H in (Hq, Hkv, Hkv)]
    return tokens, [pages, ranges_of(pages[0], table, table.block_table.shape[1] + seed), table]


def attend(q, pages, table, chosen, **softmax):
    """decode over chosen pages."""
    P, lengths = pages[0].shape[1], table.lengths
    lines = table.block_table.gather(1, chosen.clamp(min=0).long())
    end = lengths - (-(-lengths // P) - (chosen >= 0).sum(1)).to(torch.int32) * P
    return ops.decode(q, *pages, end, block_table=lines, **softmax)


def in_turn(queries, keys, values, pages, ranges, table, *, cos=None, sin=None):
    """The rotated queries, once the token is stored."""
    if cos is not None:
        places = table.lengths.view(queries.shape[0], -1)[:, :1].clone()
        queries, keys = (ops.rope(x, cos, sin, places) for x in (queries, keys))
    ops.append_tokens_(pages, [keys, values], table)
    oracle.quest_step.note_key_(pages[0], ranges, table)
    return queries


def good_choice(chosen, queries, ranges, lengths, page_size):
    """No page left out has a score clearly above one that is read, and the newest page is read."""
    R, D = len(lengths), queries.shape[3]
    q = queries.reshape(R, -1, D).double()
    scores = (torch.cat([q, -q], -1).relu() @ ranges.double().transpose(1, 2)).amax(1)
    for r, (length, row) in enumerate(zip(lengths.tolist(), chosen.tolist(), strict=True)):
        blocks = -(-length // page_size)
        read, count = [page for page in row if page >= 0], min(len(row), blocks)
        assert row == sorted(set(read)) + [-1] * (len(row) - count) and len(read) == count
        if blocks:
            assert read[-1] == blocks - 1 and read[0] >= 0
        left = sorted(set(range(blocks)) - set(read))
        if left and count > 1:
            assert scores[r, left].max() <= scores[r, read[:-1]].min() + 0.02 * scores[r, :blocks].abs().max()


@pytest.mark.parametrize(("dtype", "shape", "backend"), covering(DTYPES, SHAPES, BACKENDS), indirect=["backend"])
def test_a_step_of_quest_is_its_parts_in_turn(backend, shape, dtype):
    B, Hq, _, _, rotary_dim, P, pages_read, longest = shape
    for seed in range(3):
        tokens, given = new_state(shape, seed, dtype)
        others, turns = others_of(given[2], P), rotation(longest + 1, rotary_dim)
        softmax = {"softcap": 5.0, "sink_logits": torch.randn(Hq), "scale": 0.3} if seed == 2 else {}
        ours, theirs = clones(given), clones(given)
        found = ops.quest_step_(*tokens, *ours[0], *ours[1:], pages_read=pages_read, **turns, **softmax)
        rotated = in_turn(*tokens, *theirs, **turns)
        lengths, exact = theirs[2].lengths, backend not in ("emulated", "cuda")
        same_rows((ours[0], ours[2]), (theirs[0], theirs[2]), exact)
        check_table(ours[2], P, others)
        good_choice(found.chosen, rotated, theirs[1], lengths, P)
        expected = attend(rotated, theirs[0], theirs[2], found.chosen, **softmax)
        held = torch.arange(ours[1].shape[1])[None] * P < lengths[:, None]
        if exact:
            width = min(pages_read, given[2].block_table.shape[1])
            assert torch.equal(found.chosen, choose(rotated, theirs[1].nan_to_num(0.0), lengths, P, width))
            assert all(torch.equal(x, y) for x, y in zip(found[:2], expected, strict=True))
            assert torch.equal(ours[1][held], theirs[1][held])
        close(found[:2], expected, dtype)
        close([ours[1][held]], [theirs[1][held]], dtype)
        assert ours[1][~held].isnan().all()
        assert found.chosen.dtype == torch.int32 and found.out.dtype == dtype and found.lse.dtype == torch.float32


def dequantized(codes, scales, dtype):
    return ops.dequantize(codes, scales, "int8", dtype)


@pytest.mark.parametrize(
    ("kind", "dtype", "shape", "backend"),
    covering(("int8", "int4"), DTYPES, [x for x in SHAPES if x[3] % 2 == 0], BACKENDS), indirect=["backend"],
)  # fmt: skip
def test_a_step_over_codes_is_its_parts_in_turn(backend, kind, dtype, shape):
    """Ranges are of what the codes of keys stand for, so that no page holds a key above its score."""
    B, Hq, Hkv, D, rotary_dim, P, pages_read, longest = shape
    for seed in range(2):
        tokens, (pages, _, table) = new_state(shape, seed, dtype)
        (k_codes, k_scales), (v_codes, v_scales) = (
            ops.quantize(x, y) for x, y in zip(pages, ("int8", kind), strict=True)
        )
        ranges = ranges_of(dequantized(k_codes, k_scales, dtype), table, table.block_table.shape[1] + seed)
        turns, others = rotation(longest + 1, rotary_dim), others_of(table, P)
        given = [[k_codes, v_codes, k_scales, v_scales], ranges, table]
        (ours, our_ranges, our_table), (theirs, _, rows) = clones(given), clones(given)
        named = {"key_scales": ours[2], "value_scales": ours[3]}
        found = ops.quest_step_(*tokens, *ours[:2], our_ranges, our_table, pages_read=pages_read, **turns, **named)
        q, k, v = tokens
        if turns:
            places = rows.lengths.view(B, -1)[:, :1].clone()
            q, k = (ops.rope(x, **turns, positions=places) for x in (q, k))
        new = [ops.quantize(x, y) for x, y in zip((k, v), ("int8", kind), strict=True)]
        ops.append_tokens_(theirs, [new[0][0], new[1][0], new[0][1], new[1][1]], rows)
        check_table(our_table, P, others)
        for x, y in zip(ours, theirs, strict=True):
            for row, other in zip(rows_of(x, our_table), rows_of(y, rows), strict=True):
                assert torch.equal(row, other)
        wanted = ranges_of(dequantized(theirs[0], theirs[2], dtype), rows, our_ranges.shape[1])
        torch.testing.assert_close(our_ranges, wanted, rtol=0, atol=0, equal_nan=True)
        good_choice(found.chosen, q, wanted, rows.lengths, P)
        named = {"key_scales": theirs[2], "value_scales": theirs[3]}
        expected = attend(q, theirs[:2], rows, found.chosen, **named)
        assert all(torch.equal(x, y) for x, y in zip(found[:2], expected, strict=True))
        held = ops.quest_step_(q, None, None, *theirs[:2], wanted, rows, pages_read=pages_read, **named)
        assert all(torch.equal(x, y) for x, y in zip(found, held, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_quest_is_the_reference(backend, dtype):
    tokens, given = new_state(SHAPES[0], 0, dtype)
    ours = clones(given)
    exact = clones([[x.double() for x in given[0]], given[1].double().nan_to_num(0.0), given[2]])
    found = ops.quest_step_(*tokens, *ours[0], *ours[1:], pages_read=3, **rotation(40, 16))
    wanted = oracle.quest_step_(*(x.double() for x in tokens), *exact[0], *exact[1:], pages_read=3, **rotation(40, 16))
    assert torch.equal(found.chosen, wanted[2])
    close(found[:2], wanted[:2], dtype)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[7]])
def test_a_token_that_is_held_already_reads_the_same(backend, shape):
    P, pages_read = shape[5:7]
    tokens, given = new_state(shape, 1, torch.float32)
    ours = clones(given)
    found = ops.quest_step_(*tokens, *ours[0], *ours[1:], pages_read=pages_read)
    before = clones(ours)
    again = ops.quest_step_(tokens[0], None, None, *ours[0], *ours[1:], pages_read=pages_read)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    assert unchanged([x for x in ours if x is not ours[1]], [x for x in before if x is not before[1]])
    assert torch.equal(ours[1].nan_to_num(7.0), before[1].nan_to_num(7.0))
    empty = torch.zeros_like(ours[2].lengths)
    nothing = ops.quest_step_(
        tokens[0], None, None, *ours[0], ours[1], ours[2]._replace(lengths=empty), pages_read=pages_read
    )
    assert (nothing.chosen == -1).all() and (nothing.out == 0).all() and (nothing.lse == -torch.inf).all()


def test_a_step_that_reads_every_page_is_a_paged_step(backend):
    tokens, given = new_state(SHAPES[7], 0, torch.float32)
    ours, plain = clones(given), clones(given)
    found = ops.quest_step_(*tokens, *ours[0], *ours[1:], pages_read=99, **rotation(40, 16))
    expected = ops.paged_step_(*tokens, *plain[0], plain[2], **rotation(40, 16))
    assert all(torch.equal(x, y) for x, y in zip(found[:2], expected, strict=True))
    same_rows((ours[0], ours[2]), (plain[0], plain[2]), exact=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_pages_whose_score_is_no_number_are_read(backend, bad):
    """0 * inf is not a number either. Such a score is above all others."""
    shape = (1, 2, 1, 8, 0, 2, 3, 40)
    tokens, (pages, _, table) = new_state(shape, 4, torch.float32)
    table.lengths.fill_(14)
    pages[0][table.block_table[0, 2], 1, 5] = bad
    tokens[0][..., 5] = 0.0
    ranges = ranges_of(pages[0], table, table.block_table.shape[1])
    ops.append_tokens_(pages, tokens[1:], table)
    oracle.quest_step.note_key_(pages[0], ranges, table)
    found = ops.quest_step_(tokens[0], None, None, *pages, ranges, table, pages_read=3)
    assert 2 in found.chosen[0].tolist() and found.chosen[0, 2] == 7 and found.out.isnan().any()
    tokens[1].fill_(float("nan"))  # and so is a new key that is none
    ops.quest_step_(*tokens, *pages, ranges, table, pages_read=3)
    assert ranges[0, 7].isnan().all() or table.lengths[0] > 15


# ---- refusals ----


def quest_state(free: int = 2):
    """test_steps.state with ranges of its rows."""
    pages, table, *_ = state(free)
    return [pages, ranges_of(pages[0], table, 3).nan_to_num(0.0), table]


def step(given, **options):
    q, k, v = torch.randn(1, 4, 1, 2), torch.randn(1, 2, 1, 2), torch.randn(1, 2, 1, 2)
    tokens = [options.pop(name, x) for name, x in (("queries", q), ("keys", k), ("values", v))]
    return ops.quest_step_(*tokens, *given[0], *given[1:], **({"pages_read": 1} | options))


def narrow(given):
    given[1], given[2] = given[1][:, :2].contiguous(), given[2]._replace(
        block_table=given[2].block_table[:, :2].contiguous(), lengths=torch.tensor([8, 8], dtype=torch.int32)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "options", "message"),
    [
        ({"free": 1}, {}, "free"),
        ({"free": 2, "change": narrow}, {}, "block_table must have room for 9 slots in row 0"),
        ({}, {"cos": torch.ones(6, 1), "sin": torch.ones(6, 1)}, r"positions .* between 0 and 5 .* got 6 in row 0"),
        ({"change": lambda given: given[2].lengths.fill_(-1)}, {}, "lengths must be between 0 and 12"),
        (
            {"change": lambda given: given[2].lengths.fill_(13)},
            {"keys": None, "values": None},
            "lengths must be between 0 and 12",
        ),
        (
            {"change": lambda given: given[2].block_table.fill_(9)},
            {"keys": None, "values": None},
            r"block_table must name pages between 0 and 3, got 9 at \[0, 0\]",
        ),
        *(  # chosen or not
            (
                {"change": lambda given: given[2].block_table[1].copy_(torch.tensor([-1, 0, -1]))},
                {"pages_read": pages_read},
                r"block_table must name pages between 0 and 3, got -1 at \[1, 0\]",
            )
            for pages_read in (1, 3)
        ),
    ],
)
def test_a_refused_step_changes_nothing(cpu, how, options, message):
    given = quest_state(how.get("free", 2))
    how.get("change", lambda given: None)(given)
    before = clones(given)
    with pytest.raises(RuntimeError, match=message):
        step(given, **options)
    assert unchanged(given, before)


@pytest.mark.parametrize("free", [1, 2])
def test_a_device_notes_a_step_that_it_refused(cuda, free):
    given = quest_state(free)
    if free == 2:
        given[2].block_table[1, 0] = -1
    before = clones(given)
    step(given)
    assert given[2].free_count.tolist() == [free, 1]
    given[2].free_count[1] = 0
    assert unchanged(given, before)


def test_a_position_outside_the_tables_is_no_number_on_a_device(cuda):
    _, lse, _ = step(quest_state(), cos=torch.ones(6, 1), sin=torch.ones(6, 1))
    assert lse.isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pages_read": 0}, "pages_read must be at least 1, got 0"),
        ({"pages_read": 1.5}, "pages_read must be an integer, got 1.5"),
        ({"queries": torch.randn(1, 4, 2, 2)}, "queries must be of one token, got 2"),
        ({"keys": None}, "keys and values must be given together, and with cos and sin; got values alone"),
        ({"values": None}, "keys and values must be given together, and with cos and sin; got keys alone"),
        ({"keys": None, "values": None, "cos": torch.ones(9, 1), "sin": torch.ones(9, 1)}, "got cos, sin alone"),
        ({"keys": torch.randn(1, 2, 2, 2)}, r"keys must be torch.float32 \(1, 2, 1, 2\)"),
        ({"cos": torch.ones(9, 1)}, "cos and sin must be given together"),
        ({"scale": float("inf")}, "scale must be finite"),
        ({"softcap": 0.0}, "softcap must be above 0"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    given = quest_state()
    before = clones(given)
    with pytest.raises(ValueError, match=message):
        step(given, **options)
    assert unchanged(given, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_scales": None}, "key_scales must be torch.float16 .* got None"),
        ({"keys": torch.randn(1, 2, 1, 2).half()}, r"keys must be torch.float32 \(1, 2, 1, 2\)"),
        ({"ranges": torch.zeros(2, 3, 4).char()}, "ranges must be float32, bfloat16 or float16, got torch.int8"),
    ],
)
def test_wrong_arguments_of_codes_are_named(change, message):
    pages, ranges, table = quest_state()
    (k, k_scales), (v, v_scales) = (ops.quantize(x, "int8") for x in pages)
    given = [[k, v], change.pop("ranges", ranges), table]
    before = clones(given)
    with pytest.raises(ValueError, match=message):
        step(given, **{"key_scales": k_scales, "value_scales": v_scales, **change})
    assert unchanged(given, before)


@pytest.mark.parametrize(
    "ranges", [torch.zeros(2, 2, 4), torch.zeros(2, 3, 2), torch.zeros(1, 3, 4), torch.zeros(2, 3, 4).bfloat16()]
)
def test_ranges_of_another_shape_are_named(ranges):
    given = quest_state()
    with pytest.raises(ValueError, match=r"ranges must be torch.float32 \(2, 3, 4\) on cpu, got"):
        step([given[0], ranges, given[2]])
    with pytest.raises(ValueError, match="ranges must be contiguous"):
        step([given[0], torch.zeros(2, 4, 3).transpose(1, 2), given[2]])


def test_a_backward_pass_is_refused():
    q, k, v = (torch.randn(1, h, 1, 2, requires_grad=True) for h in (4, 2, 2))
    found = step(quest_state(), queries=q, keys=k, values=v)
    with pytest.raises(NotImplementedError, match="no gradient"):
        found.out.sum().backward()


def test_opcheck():
    pages, ranges, table = quest_state()
    q, k, v = torch.randn(1, 4, 1, 2), torch.randn(1, 2, 1, 2), torch.randn(1, 2, 1, 2)
    angles = torch.ones(9, 1)
    for keys, values, turns in ((k, v, (angles, angles)), (None, None, (None, None))):
        arguments = (q, keys, values, *pages, ranges, *table, 2, *turns, 0.5, None, 0.0)
        torch.library.opcheck(torch.ops.kvcompress.quest_step_.default, arguments)
