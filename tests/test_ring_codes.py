"""A decoded step of a ring whose keys and values are codes, and of one whose tokens become codes as they leave it."""

import pytest
import torch
from backends import BACKENDS
from helpers import DTYPES, covering
from test_ring_step import (
    KINDS,
    SHAPES,
    copy_of,
    in_turn,
    new_state,
    options_of,
    same_state,
    start_places,
    step,
    tokens,
)
from test_steps import close

from kvcompress import ops
from kvcompress.caches.formats import FORMATS


def steps_are_their_parts_in_turn(backend, state, kind, shape, dtype):
    """Two steps: the same bits on CPUs."""
    B, Hq, Hkv, D, rotary_dim = shape
    options = options_of(kind, B, Hkv, D, rotary_dim)
    ours, theirs, on_cuda = copy_of(state), copy_of(state), backend in ("emulated", "cuda")
    for _ in range(2):
        new = tokens(B, Hq, Hkv, D, dtype)
        out, wanted = ops.ring_step_(*new, **ours, **options), in_turn(*new, theirs, **options)
        if on_cuda:
            close(out, wanted, dtype)
        else:
            assert all(torch.equal(x, y) for x, y in zip(out, wanted, strict=True))
    same_state(ours, theirs, not on_cuda)


@pytest.mark.parametrize(
    ("format", "dtype", "kind", "shape", "backend"),
    covering(
        FORMATS, DTYPES, [kind for kind in KINDS if kind.startswith("pages")], [x for x in SHAPES if x[3] <= 128],
        BACKENDS,
    ),
    indirect=["backend"],
)  # fmt: skip
def test_what_leaves_a_ring_may_become_codes(backend, format, dtype, kind, shape):
    B, _, Hkv, D, _ = shape
    torch.manual_seed(D)
    state = new_state(kind, B, Hkv, D, dtype, start_places(kind, B, 1))
    for name, scales, code in zip(("k_pages", "v_pages"), ("key_scales", "value_scales"), FORMATS[format], strict=True):
        state[name], state[scales] = ops.quantize(state[name], code)
    steps_are_their_parts_in_turn(backend, state, kind, shape, dtype)


@pytest.mark.parametrize(
    ("format", "dtype", "kind", "shape", "backend"),
    covering(FORMATS, DTYPES, [kind for kind in KINDS if not KINDS[kind][2].get("marked")], SHAPES, BACKENDS),
    indirect=["backend"],
)
def test_a_ring_of_codes(backend, format, dtype, kind, shape):
    B, _, Hkv, D, _ = shape
    torch.manual_seed(D)
    state = new_state(kind, B, Hkv, D, dtype, start_places(kind, B, 1))
    for name in ("ring", "far") if "k_far" in state else ("ring",):
        for x, code in zip("kv", FORMATS[format], strict=True):
            state[f"{x}_{name}"], state[f"{x}_{name}_scales"] = ops.quantize(state[f"{x}_{name}"], code)
    steps_are_their_parts_in_turn(backend, state, kind, shape, dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_ring_scales": None}, "k_ring_scales must be torch.float16 .* got None"),
        ({"v_far_scales": torch.ones(2, 5).half()}, r"v_far_scales must be torch.float16 \(2, 3\)"),
        ({"v_far": torch.ones(2, 3, 1).byte(), "k_far_scales": None}, "k_far_scales must be"),
        ({"k_ring": torch.randn(2, 8, 2)}, "k_ring must be int8 where there are scales"),
        ({"neuron": 0}, "k_ring_scales must not come with a table or a neuron"),
    ],
)
def test_wrong_codes_of_a_ring_are_named_and_change_nothing(change, message):
    state = new_state("sinks apart", 1, 2, 2, torch.float32, [9])
    for name in ("k_ring", "v_ring", "k_far", "v_far"):
        state[name], state[f"{name}_scales"] = ops.quantize(state[name], "int8")
    state |= change
    before = copy_of({name: x for name, x in state.items() if isinstance(x, torch.Tensor)})
    with pytest.raises(ValueError, match=message):
        step(state, **options_of("sinks apart", 1, 2, 2, 0))
    assert all(torch.equal(state[name], x) for name, x in before.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_scales": None}, "key_scales must be torch.float16 .* got None"),
        ({"k_pages": torch.randn(4, 4, 2)}, "k_pages must be int8 where there are scales"),
        ({"value_scales": torch.ones(4, 3).half()}, "value_scales must be torch.float16"),
    ],
)
def test_wrong_codes_are_named_and_change_nothing(change, message):
    state = new_state("pages", 1, 2, 2, torch.float32, [9], room=8)
    pages = len(state["table"].refs)
    state |= {"k_pages": torch.ones(pages, 4, 2).char(), "v_pages": torch.ones(pages, 4, 1).byte()}
    state |= {name: torch.ones(pages, 4).half() for name in ("key_scales", "value_scales")}
    wrong = {name: None if x is None else x[:1].expand(pages, *x.shape[1:]).contiguous() for name, x in change.items()}
    before = copy_of(state)
    with pytest.raises(ValueError, match=message):
        step(state | wrong, **options_of("pages", 1, 2, 2, 0))
    same_state(state, before, exact=True)
