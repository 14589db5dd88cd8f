import functools
import math
import warnings
from fractions import Fraction

import oracle
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import planner as definitions

import kvcompress
from kvcompress import ops
from kvcompress.planner import Plan

INCREMENTAL = ops.SCHEDULES[1:]
plan = functools.partial(kvcompress.plan, least_memory=0)  # the paper's
pytestmark = pytest.mark.filterwarnings("ignore:memory_size = .* is large")


@st.composite
def sizes(draw, least=1):
    """Arguments of a plan, initial_memory left to its default half of the time."""
    memory_size = draw(st.integers(1, 900))
    return {
        "prompt_length": draw(st.integers(least, 5000)),
        "chunk_size": draw(st.integers(1, 700)),
        "memory_size": memory_size,
        "initial_memory": draw(st.none() | st.integers(0, memory_size)),
        "layers": draw(st.integers(1, 5)),
        "min_chunk": draw(st.integers(1, 60)),
    }


@st.composite
def safe_sizes(draw):
    """A prompt of whole chunks that every schedule can read with decremental chunks."""
    chunk_size, n = draw(st.integers(4, 300)), draw(st.integers(2, 40))
    return {
        "prompt_length": chunk_size * n,
        "chunk_size": chunk_size,
        "memory_size": draw(st.integers(1, chunk_size)),
        "layers": draw(st.integers(1, 5)),
    }


def iterations(memory):
    return zip((0, *memory), memory, strict=False)


@given(sizes(least=0), st.sampled_from(ops.SCHEDULES), st.booleans())
def test_plan_is_the_definitions(arguments, schedule, dynamic):
    ours = plan(**arguments, schedule=schedule, dynamic=dynamic)
    first = arguments.pop("initial_memory")
    expected = oracle.plan(
        **arguments, initial_memory=-1 if first is None else first, schedule=schedule, dynamic=dynamic
    )
    assert list(ours.chunks) == expected.chunks
    assert list(ours.memory) == expected.mean_memory
    assert list(ours.clamped) == expected.clamped
    assert [list(row) for row in ours.layer_memory] == expected.memory
    assert [list(row) for row in ours.layer_stored] == expected.stored
    assert list(ours.stored) == [max(row) for row in zip(*expected.stored, strict=True)]
    pairs = [definitions.attended_pairs(expected.chunks, stored) for stored in expected.stored]
    assert ours.attended_pairs == Fraction(sum(pairs), len(pairs))


@given(sizes(), st.sampled_from(ops.SCHEDULES), st.booleans())
def test_chunks_sum_to_the_prompt_and_memory_never_exceeds_what_was_seen(arguments, schedule, dynamic):
    ours = plan(**arguments, schedule=schedule, dynamic=dynamic)
    length, chunk, memory_size = (arguments[name] for name in ("prompt_length", "chunk_size", "memory_size"))
    assert sum(ours.chunks) == length
    assert min(ours.chunks) >= 1
    assert len(ours) == -(-length // chunk)
    seen = torch.tensor(ours.chunks).cumsum(0).tolist()
    for memory, stored in zip(ours.layer_memory, ours.layer_stored, strict=True):
        assert all(before <= after <= memory_size for before, after in iterations(memory))
        assert memory[-1] == memory_size
        assert all(0 <= held <= min(planned, end) for held, planned, end in zip(stored, memory, seen, strict=True))
        assert all(before <= after for before, after in iterations(stored))
        assert stored[-1] <= min(memory_size, length)
    contexts = [held + chunk for held, chunk in zip((0, *ours.stored), ours.chunks, strict=False)]
    assert ours.largest_context == max(contexts)
    if schedule == "fixed":
        assert ours.stored[-1] == min(memory_size, length)
        assert ours.largest_context <= memory_size + chunk


@given(sizes(), st.sampled_from(ops.SCHEDULES))
def test_whole_numbers_are_near_the_formulas(arguments, schedule):
    ours = plan(**arguments, schedule=schedule)
    n, m = len(ours), arguments["memory_size"]
    first = arguments["initial_memory"]
    within = 1 if m >= n or first is not None else 1.5
    rules = definitions.layer_schedules(schedule, arguments["layers"])
    for rule, memory in zip(rules, ours.layer_memory, strict=True):
        real = definitions.real_memory(rule, m, Fraction(m, n) if first is None else Fraction(first), n)
        assert all(abs(ours - exact) <= within + 1e-9 for ours, exact in zip(memory, real, strict=True))


@given(safe_sizes(), st.sampled_from(ops.SCHEDULES))
def test_decremental_chunks_are_near_the_formula(arguments, schedule):
    ours = plan(**arguments, schedule=schedule, dynamic=True)
    assume(not ours.clamped)
    n, m = len(ours), arguments["memory_size"]
    layers = [
        definitions.real_memory(rule, m, Fraction(m, n), n)
        for rule in definitions.layer_schedules(schedule, arguments["layers"])
    ]
    real = definitions.real_chunks(sum(ours.chunks), [sum(row) / len(row) for row in zip(*layers, strict=True)])
    # layers of unlike sizes have a mean that is rounded once more
    within = 2.5 if schedule == "square-sqrt" else 2
    assert all(abs(chunk - exact) < within for chunk, exact in zip(ours.chunks, real, strict=True))


@given(sizes(), st.sampled_from(ops.SCHEDULES))
def test_decremental_chunks_and_memory_keep_one_size(arguments, schedule):
    ours = plan(**arguments, schedule=schedule, dynamic=True)
    whole = len(ours) - len(ours.clamped)
    assert ours.clamped == tuple(range(whole, len(ours)))
    held = [chunk + memory for chunk, memory in zip(ours.chunks[1:], ours.memory, strict=False)]
    if whole > 1:
        assert max(held[: whole - 1]) - min(held[: whole - 1]) <= 1
    assert all(before >= after for before, after in zip(ours.chunks[1:], ours.chunks[2:], strict=False))
    least = min(arguments["min_chunk"], sum(ours.chunks) // len(ours))
    assert min(ours.chunks) >= least
    assert {ours.chunks[i] for i in ours.clamped} <= {least}


@given(sizes())
def test_fixed_memory_makes_decremental_chunks_equal(arguments):
    chunks = plan(**arguments, schedule="fixed", dynamic=True).chunks
    assert max(chunks) - min(chunks) <= 1


@given(chunk=st.integers(1, 500), memory=st.integers(1, 900), schedule=st.sampled_from(ops.SCHEDULES))
def test_two_whole_chunks_cannot_shrink(chunk, memory, schedule):
    shrinking = plan(2 * chunk, chunk_size=chunk, memory_size=memory, schedule=schedule, dynamic=True)
    assert shrinking == plan(2 * chunk, chunk_size=chunk, memory_size=memory, schedule=schedule)


@given(sizes(), st.sampled_from(ops.SCHEDULES), st.booleans())
def test_memory_that_starts_at_its_full_size_is_fixed_memory(arguments, schedule, dynamic):
    arguments["initial_memory"] = arguments["memory_size"]
    ours = plan(**arguments, schedule=schedule, dynamic=dynamic)
    assert ours == plan(**arguments, schedule="fixed", dynamic=dynamic)


@given(sizes(), st.booleans())
def test_square_is_below_linear_and_linear_below_sqrt(arguments, dynamic):
    square, linear, root = (plan(**arguments, schedule=name).memory for name in ("square", "linear", "sqrt"))
    assert all(a <= b <= c for a, b, c in zip(square, linear, root, strict=True))


@given(sizes(), st.sampled_from(INCREMENTAL))
def test_growing_memory_sees_no_more_than_fixed_memory(arguments, schedule):
    fixed, growing = plan(**arguments), plan(**arguments, schedule=schedule)
    assert growing.attended_pairs <= fixed.attended_pairs
    assert growing.largest_context <= fixed.largest_context
    assert growing.key_ratio() >= 1
    assert growing.key_ratio() == pytest.approx(growing.key_ratio(fixed))
    for prune in ("layer", "forward"):
        assert sum(growing.peak_keys(prune)) <= sum(fixed.peak_keys(prune))


@given(n=st.integers(2, 30), step=st.integers(1, 10), spare=st.integers(0, 40))
def test_shrinking_chunks_save_pairs_by_being_unlike(n, step, spare):
    memory_size = 2 * step * n  # so that every size of the formulas is whole
    arguments = {"chunk_size": memory_size + spare, "memory_size": memory_size, "schedule": "linear"}
    length = n * arguments["chunk_size"]
    growing, shrinking = plan(length, **arguments), plan(length, **arguments, dynamic=True)
    squares = sum(chunk**2 for chunk in shrinking.chunks[1:]) - (n - 1) * arguments["chunk_size"] ** 2
    assert growing.attended_pairs - shrinking.attended_pairs == Fraction(squares, 2)
    assert squares >= 0
    assert shrinking.largest_context == max(length // n, arguments["chunk_size"] + shrinking.mean_memory)
    assert growing.largest_context == arguments["chunk_size"] + growing.memory[-2]
    assert shrinking.peak_keys("forward") == (shrinking.largest_context, 0)


@pytest.mark.parametrize("whole", [2, 3, 8, 20])
@pytest.mark.parametrize("chunk", [4, 5, 32, 80])
def test_default_linear_is_safe_up_to_twice_the_chunk(chunk, whole):
    ours = plan(
        chunk * whole, chunk_size=chunk, memory_size=2 * chunk - 4, schedule="linear", dynamic=True, strict=True
    )
    assert ours.stored == ours.memory


def test_a_layer_between_the_halves_grows_linearly():
    ours = plan(160, chunk_size=10, memory_size=100, schedule="square-sqrt", layers=5)
    square, linear, root = (
        plan(160, chunk_size=10, memory_size=100, schedule=name).memory for name in ("square", "linear", "sqrt")
    )
    assert ours.layer_memory == (square, square, linear, root, root)
    assert plan(160, chunk_size=10, memory_size=100, schedule="square-sqrt").layer_memory == (linear,)


def test_a_plan_of_three_rows_is_one_of_one_layer():
    ours = plan(32, chunk_size=8, memory_size=8, schedule="linear", dynamic=True)
    assert Plan(ours.chunks, ours.memory, ours.stored) == ours


def test_adaptive_starts_from_linear():
    linear = plan(100, chunk_size=10, memory_size=15, schedule="linear", layers=3, dynamic=True)
    assert plan(100, chunk_size=10, memory_size=15, schedule="adaptive", layers=3, dynamic=True) == linear


@pytest.mark.parametrize("schedule", ops.SCHEDULES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_short_prompts(schedule, dynamic):
    empty = plan(0, chunk_size=4, memory_size=4, schedule=schedule, dynamic=dynamic, layers=2)
    assert len(empty) == 0 and empty.layer_memory == ((), ())
    assert empty.largest_context == empty.mean_memory == empty.attended_pairs == sum(empty.peak_keys()) == 0
    assert empty.key_ratio() == empty.pair_ratio(empty) == empty.speedup(1.0) == 1
    one = plan(3, chunk_size=4, memory_size=5, initial_memory=1, schedule=schedule, dynamic=dynamic)
    assert (one.chunks, one.memory, one.stored, one.clamped) == ((3,), (5,), (3,), ())
    assert one.largest_context == 3 and one.mean_memory == 0 and one.key_ratio() == 1 and one.attended_pairs == 6
    tokens = plan(6, chunk_size=1, memory_size=3, schedule=schedule, dynamic=dynamic)
    assert tokens.chunks == (1,) * 6


# ---- worked examples ----


def test_examples_of_growing_memory_and_shrinking_chunks():
    sizes = {"prompt_length": 32, "chunk_size": 8, "memory_size": 8}
    fixed, growing = plan(**sizes), plan(**sizes, schedule="linear")
    shrinking = plan(**sizes, schedule="linear", dynamic=True)
    assert (fixed.chunks, fixed.memory, fixed.largest_context) == ((8,) * 4, (8,) * 4, 16)
    assert (growing.chunks, growing.memory, growing.largest_context) == ((8,) * 4, (2, 4, 6, 8), 14)
    assert (shrinking.chunks, shrinking.memory, shrinking.largest_context) == ((8, 10, 8, 6), (2, 4, 6, 8), 12)
    assert growing.mean_memory == shrinking.mean_memory == 4
    assert fixed.mean_memory == 8
    assert shrinking.key_ratio() == shrinking.key_ratio(fixed) == growing.key_ratio(fixed) == 16 / 12
    assert shrinking.speedup(1.0) == pytest.approx(4 / 3)
    assert shrinking.speedup(0.6, fixed) == pytest.approx(1.2)
    # the same run seen from the other: attention is 0.6 of 1 here, 0.8 of 1.2 there
    assert shrinking.speedup(0.8 / 1.2, share_of="other") == pytest.approx(1.2)
    assert (fixed.attended_pairs, growing.attended_pairs, shrinking.attended_pairs) == (336, 240, 236)
    assert shrinking.pair_ratio(fixed) == 336 / 236
    assert [x.peak_keys("forward") for x in (fixed, growing, shrinking)] == [(16, 0), (14, 0), (12, 0)]
    assert [x.peak_keys("layer") for x in (fixed, growing, shrinking)] == [(8, 16), (8, 14), (8, 12)]
    deep = plan(**sizes, schedule="linear", dynamic=True, layers=10)
    assert (deep.peak_keys("forward"), deep.peak_keys("layer")) == ((120, 0), (80, 12))


@pytest.mark.parametrize(
    ("schedule", "memory", "chunks", "contexts"),
    [
        ("sqrt", (2, 7, 9, 11, 12), (10, 15, 10, 7, 5), [10, 17, 17, 16, 16]),
        ("square", (2, 3, 5, 8, 12), (10, 12, 11, 9, 5), [10, 14, 14, 14, 13]),
    ],
)
def test_examples_of_curved_schedules(schedule, memory, chunks, contexts):
    ours = plan(47, chunk_size=10, memory_size=12, schedule=schedule, dynamic=True)
    assert (ours.memory, ours.chunks, ours.stored) == (memory, chunks, memory)
    assert [held + chunk for held, chunk in zip((0, *memory), chunks, strict=False)] == contexts
    assert ours.largest_context == max(contexts)
    assert plan(47, chunk_size=10, memory_size=12, schedule=schedule).chunks == (10, 10, 10, 10, 7)
    real = definitions.real_memory(schedule, 12, Fraction(12, 5), 5)
    expected = {"sqrt": [2.4, 7.2, 9.1882, 10.7138, 12], "square": [2.4, 3, 4.8, 7.8, 12]}
    assert real == pytest.approx(expected[schedule], abs=5e-5)
    expected = {"sqrt": [9.4, 14.3755, 9.5755, 7.5873, 6.0617], "square": [9.4, 11.5, 10.9, 9.1, 6.1]}
    assert definitions.real_chunks(47, real) == pytest.approx(expected[schedule], abs=5e-5)


@pytest.mark.parametrize(
    ("min_chunk", "chunks", "clamped", "stored", "contexts"),
    [
        (1, (8, 16, 12, 8, 3, 1), (5,), (4, 8, 12, 16, 19, 20), [8, 20, 20, 20, 19, 20]),
        (4, (8, 15, 11, 6, 4, 4), (4, 5), (4, 8, 12, 16, 20, 24), [8, 19, 19, 18, 20, 24]),
    ],
)
def test_example_of_a_memory_that_leaves_no_room_for_chunks(min_chunk, chunks, clamped, stored, contexts):
    arguments = {"chunk_size": 8, "memory_size": 24, "schedule": "linear", "dynamic": True, "min_chunk": min_chunk}
    with pytest.warns(UserWarning, match=f"{len(clamped)} of 6 chunks, from iteration {clamped[0]} on"):
        ours = plan(48, **arguments)
    assert ours.memory == (4, 8, 12, 16, 20, 24)
    assert (ours.chunks, ours.clamped, ours.stored) == (chunks, clamped, stored)
    assert [held + chunk for held, chunk in zip((0, *stored), chunks, strict=False)] == contexts
    with pytest.raises(ValueError, match=f"smaller .* if strict: .* min_chunk = {min_chunk}, got memory_size = 24"):
        plan(48, **arguments, strict=True)


def test_a_chunk_clamped_by_rounding_alone_is_no_warning():
    arguments = {"chunk_size": 2, "memory_size": 4, "schedule": "linear", "dynamic": True, "min_chunk": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(12, **arguments).clamped
    with pytest.raises(ValueError, match="of 6 chunks"):
        plan(12, **arguments, strict=True)


@pytest.mark.parametrize(
    ("ratios", "highest", "expected"),
    [
        ((1, 3, 2, 4), 24, [2, 7, 5, 10]),
        ((0, 5, 2.5, 2.5), 24, [1, 11, 6, 6]),
        ((0, 0, 0, 0), 24, [6, 6, 6, 6]),
        ((1, 1, 1, 7), 10, [5, 5, 4, 10]),
    ],
)
def test_examples_of_divided_memory(ratios, highest, expected):
    kept = [round(10 * ratio) for ratio in ratios]
    assert ops.divide_memory(24, kept, [100] * 4, lowest=[1] * 4, highest=[highest] * 4).tolist() == expected


# ---- divide_memory ----


@st.composite
def divisions(draw, denominators, totals):
    layers = draw(st.integers(0, 6))
    stored = draw(st.lists(denominators, min_size=layers, max_size=layers))
    kept = [draw(st.integers(0, most)) for most in stored]
    highest = [draw(st.integers(0, 60) | totals) for _ in stored]
    lowest = [draw(st.integers(0, min(most, 12))) for most in highest]
    return draw(totals), kept, stored, lowest, highest


@given(divisions(st.integers(0, 12), st.integers(0, 200)) | divisions(st.integers(0, 2**31 - 1), st.integers(0, 2**44)))
def test_divided_memory_is_the_definition(division):
    total, kept, stored, lowest, highest = division
    ours = ops.divide_memory(total, kept, stored, lowest=lowest, highest=highest).tolist()
    ratios = [Fraction(part, whole) if whole else Fraction(0) for part, whole in zip(kept, stored, strict=True)]
    weights = definitions.memory_weights(total, ratios)
    assert ours == oracle.divide_memory(total, weights, lowest, highest)
    if all(whole <= 12 for whole in stored):
        assert weights == ratios  # exact: every common denominator is small
    assert sum(ours) == min(total, sum(highest))
    assert all(size <= most for size, most in zip(ours, highest, strict=True))
    if sum(lowest) <= total:
        assert all(size >= least for size, least in zip(ours, lowest, strict=True))


@given(
    base=st.integers(0, 5000),
    stored=st.lists(st.integers(1, 2**20), min_size=1, max_size=8),
    ratio=st.fractions(0, 1, max_denominator=50),
)
def test_layers_that_retain_alike_get_the_linear_size(base, stored, ratio):
    kept = [count * ratio.numerator for count in stored]
    counts = [count * ratio.denominator for count in stored]
    ours = ops.divide_memory(
        len(stored) * base, kept, counts, lowest=[min(base, 32)] * len(stored), highest=[base + 7] * len(stored)
    )
    assert ours.tolist() == [base] * len(stored)


def test_divided_memory_depends_on_ratios_not_on_counts():
    bounds = {"lowest": [1, 1, 1], "highest": [500, 500, 500]}
    ours = ops.divide_memory(301, [1, 2, 3], [4, 6, 12], **bounds)
    assert torch.equal(ours, ops.divide_memory(301, [500, 600, 2], [2000, 1800, 8], **bounds))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_length": -1}, "prompt_length must be at least 0, got -1"),
        ({"prompt_length": 2**63}, f"prompt_length must be at most {2**63 - 1}, got {2**63}"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"chunk_size": 4.0}, "chunk_size must be an integer, got 4.0"),
        ({"memory_size": 0}, "memory_size must be at least 1, got 0"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"min_chunk": 0}, "min_chunk must be at least 1, got 0"),
        ({"initial_memory": 5}, "initial_memory must be between 0 and memory_size = 4, .*got 5"),
        ({"initial_memory": -1}, "initial_memory must be between 0 and memory_size = 4, got -1"),
        ({"schedule": "cubic"}, "schedule must be one of fixed, linear, .*, got 'cubic'"),
        ({"prompt_length": 2**62}, r"chunk_size must be larger for \d+ tokens and 1 layers, .* got 4"),
        ({"schedule": "sqrt", "memory_size": 2**31}, f"memory_size must be smaller for 3 iterations .*, got {2**31}"),
        ({"schedule": "square", "memory_size": 2**62}, "memory_size must be smaller for 3 iterations .*2\\*\\*63"),
        ({"dynamic": True, "memory_size": 2**62}, "memory_size must be smaller"),
        ({"layers": 2, "memory_size": 2**62}, "memory_size must be smaller .* in 2 layers"),
    ],
)
def test_wrong_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(**{"prompt_length": 10, "chunk_size": 4, "memory_size": 4, **arguments})


def test_sizes_below_the_limit_are_planned():
    assert plan(10, chunk_size=4, memory_size=2**63 - 1).stored == (4, 8, 10)
    growth = math.isqrt((2**63 - 1) // 8)
    ours = plan(10, chunk_size=4, memory_size=growth, initial_memory=0, schedule="sqrt")
    assert ours.memory == (0, definitions.root_half_up(Fraction(growth**2, 2)), growth)
    with pytest.raises(ValueError, match="memory_size must be smaller"):
        plan(10, chunk_size=4, memory_size=growth + 1, initial_memory=0, schedule="sqrt")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"total": -1}, "total must be at least 0, got -1"),
        ({"total": 2**46}, "total must be below .* 2 layers, got 70368744177664"),
        ({"kept": [1, 9]}, r"kept\[1\] must be at most stored\[1\] = 8, got 9"),
        ({"kept": [-1, 0]}, r"kept\[0\] must be at least 0, got -1"),
        ({"kept": [0.5, 0]}, r"kept\[0\] must be an integer, got 0.5"),
        ({"stored": [8]}, "stored must have 2 elements, got 1"),
        ({"stored": [8, 2**31]}, r"stored\[1\] must be at most 2147483647, got 2147483648"),
        ({"lowest": [1, 21]}, r"lowest\[1\] must be at most highest\[1\] = 20, got 21"),
        ({"highest": [20, 2**63]}, r"highest\[1\] must be at most"),
    ],
)
def test_wrong_divisions_are_named(changed, message):
    right = {"total": 10, "kept": [1, 2], "stored": [8, 8], "lowest": [1, 1], "highest": [20, 20]}
    with pytest.raises(ValueError, match=message):
        ops.divide_memory(**{**right, **changed})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.speedup(1.5), "share must be between 0 and 1, got 1.5"),
        (lambda x: x.speedup(0.5, share_of="fm"), "share_of must be one of self, other, got 'fm'"),
        (lambda x: x.peak_keys("never"), "prune must be one of layer, forward, got 'never'"),
        (lambda x: x.key_ratio(plan(9, chunk_size=4, memory_size=4)), "other must read 10 tokens, got 9"),
        (lambda x: x.pair_ratio(plan(9, chunk_size=4, memory_size=4)), "other must read 10 tokens, got 9"),
    ],
)
def test_wrong_comparisons_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(plan(10, chunk_size=4, memory_size=4))
