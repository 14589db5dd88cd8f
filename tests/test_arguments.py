"""What is no tensor where an op wants one is named: TypeError or ValueError, never an AttributeError."""

import inspect
import sys

import pytest
import torch
from fuzz.ops import mapped

from kvcompress import ops
from kvcompress.ops import PageTable, Tail

ints = torch.int32


def table() -> PageTable:
    return PageTable(
        torch.zeros(2, 2, dtype=ints), torch.zeros(2, dtype=ints), torch.zeros(4, dtype=ints),
        torch.arange(4, dtype=ints), torch.tensor([4, 0], dtype=ints),
    )  # fmt: skip


def given():
    """For each op its function and arguments by name; those in OPTIONAL may be None."""
    x, gates, pages = torch.randn(1, 2, 3, 4), torch.rand(1, 2, 3), torch.zeros(4, 4, 4)
    angles, lse = torch.ones(8, 2), torch.zeros(1, 2, 1)
    pod = {
        "queries": x[:, :, :1], "keys": x[:, :, :1], "values": x[:, :, :1], "k_pages": pages, "v_pages": pages.clone(),
        "table": table(), "value_table": table(), "places": torch.zeros(1, 1, dtype=ints), "sinks": 1, "recent": 2,
        "first": 1, "moved": torch.zeros(2, dtype=ints), "cos": angles, "sin": angles, "sink_logits": torch.zeros(2),
    }  # fmt: skip
    return {
        "rope": (ops.rope, {"x": x, "cos": angles, "sin": angles, "positions": torch.zeros(1, 3, dtype=ints)}),
        "select_topk": (ops.select_topk, {"scores": gates[0], "k": 1, "lengths": torch.full((2,), 3, dtype=ints)}),
        "append_tokens_": (
            ops.append_tokens_,
            {"arrays": [pages], "tokens": [x], "table": table(), "counts": torch.ones(2, dtype=ints)},
        ),
        "truncate_rows_": (
            ops.truncate_rows_, {"table": table(), "new_lengths": torch.zeros(2, dtype=ints), "page_size": 4},
        ),
        "compact_pages_": (
            ops.compact_pages_,
            {"arrays": [pages], "table": table(), "indices": torch.zeros(2, 0, dtype=ints),
             "kept": torch.zeros(2, dtype=ints)},
        ),
        "dmc_accumulate": (
            ops.dmc_accumulate,
            {"keys": x, "values": x, "alpha": gates, "omega": gates + 1,
             "initial": (x[:, :, 0], x[:, :, 0], gates[..., 0])},
        ),
        "dmc_append_": (
            ops.dmc_append_,
            {"k_pages": pages, "v_pages": pages.clone(), "table": table(), "tail": Tail.empty(2, 4), "keys": x,
             "values": x, "alpha": gates, "omega": gates + 1, "cos": angles, "sin": angles,
             "positions": torch.zeros(1, 3, dtype=ints), "counts": torch.ones(2, dtype=ints)},
        ),
        "paged_step_": (
            ops.paged_step_,
            {"queries": x, "keys": x, "values": x, "k_pages": pages, "v_pages": pages.clone(), "table": table(),
             "shift": torch.zeros(2, dtype=ints), "begin": torch.zeros(2, dtype=ints), "cos": angles, "sin": angles,
             "sink_logits": torch.zeros(2)},
        ),
        "quest_step_": (
            ops.quest_step_,
            {"queries": x[:, :, :1], "keys": x[:, :, :1], "values": x[:, :, :1], "k_pages": pages,
             "v_pages": pages.clone(), "ranges": torch.zeros(2, 2, 8), "table": table(), "pages_read": 1,
             "cos": angles, "sin": angles, "sink_logits": torch.zeros(2)},
        ),
        "dmc_step_": (
            ops.dmc_step_,
            {"queries": x[:, :, :1], "keys": x[:, :, :1], "values": x[:, :, :1], "k_pages": pages,
             "v_pages": pages.clone(), "table": table(), "tail": Tail.empty(2, 4),
             "places": torch.zeros(1, 1, dtype=ints), "neuron": -1, "offsets": torch.zeros(1, 1, dtype=ints),
             "alpha": gates[..., :1], "omega": gates[..., :1] + 1, "cos": angles, "sin": angles,
             "sink_logits": torch.zeros(2)},
        ),
        "ring_step_": (
            ops.ring_step_,
            {"queries": x[:, :, :1], "keys": x[:, :, :1], "values": x[:, :, :1], "k_ring": torch.zeros(2, 3, 4),
             "v_ring": torch.zeros(2, 3, 4), "places": torch.zeros(1, 1, dtype=ints), "window": 3,
             "base": torch.zeros(1, 1, dtype=ints), "marks": torch.zeros(2, 3, dtype=torch.bool),
             "alpha": gates[..., :1], "k_pages": pages, "v_pages": pages.clone(), "table": table(), "neuron": 0,
             "cos": angles, "sin": angles, "sink_logits": torch.zeros(2)},
        ),
        "ring_step_ with sinks": (
            ops.ring_step_,
            {"queries": x[:, :, :1], "keys": x[:, :, :1], "values": x[:, :, :1], "k_ring": torch.zeros(2, 3, 4),
             "v_ring": torch.zeros(2, 3, 4), "places": torch.zeros(1, 1, dtype=ints), "window": 2, "sinks": 1,
             "k_far": torch.zeros(2, 1, 4), "v_far": torch.zeros(2, 1, 4)},
        ),
        "pod_step_": (ops.pod_step_, pod | {"far": "own", "far_lse": lse, "probabilities": torch.zeros(1, 2, 9)}),
        "pod_step_that_is_led": (
            ops.pod_step_,
            pod | {"far": "led", "lead": ops.Lead(x[:, :, :1], pages, torch.zeros(2, 2, dtype=ints))},
        ),
        "pod_step_that_shares": (
            ops.pod_step_, pod | {"far": "shared", "far_lse": lse, "probabilities": torch.zeros(1, 2, 9), "tau": 0.5},
        ),
        "dmc_decisions": (ops.dmc_decisions, {"logits": gates, "noise": gates}),
        "dmc_importance": (ops.dmc_importance, {"logits": gates, "kv_heads": 1}),
        "dmc_mask": (ops.dmc_mask, {"tempered": gates}),
    }  # fmt: skip


OPTIONAL = (
    "positions", "lengths", "counts", "kept", "initial", "noise", "cos", "sin", "shift", "begin", "sink_logits",
    "offsets", "base", "moved", "tau",
)  # fmt: skip
OR_NONE = [("dmc_step_", "alpha"), ("dmc_step_", "omega"), ("ring_step_", "alpha"), ("ring_step_", "neuron"),
           ("pod_step_", "probabilities")]  # fmt: skip
CASES = [
    (op, name, value)
    for op, (_, arguments) in given().items()
    for name in arguments
    for value in (None, [[1.0]], 1.5, "x", torch.zeros(0, 0, 0, 0, 0, 0))
    if not (
        value is None and (name in OPTIONAL or (op, name) in OR_NONE) and not (op == "rope" and name in ("cos", "sin"))
    )
]


@pytest.mark.parametrize(("op", "name", "value"), CASES, ids=[f"{op}-{name}-{value!r:.9}" for op, name, value in CASES])
def test_an_argument_of_another_kind_is_named(op, name, value):
    function, arguments = given()[op]
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b.* (must|need)"):
        function(**{**arguments, name: value})


@pytest.mark.parametrize("op", given())
def test_the_arguments_of_these_tests_are_good(op):
    function, arguments = given()[op]
    function(**arguments)


@pytest.mark.parametrize(
    ("op", "name", "part"),
    [("append_tokens_", "arrays", 0), ("append_tokens_", "tokens", 0), ("compact_pages_", "arrays", 0),
     ("dmc_accumulate", "initial", 1), *(("append_tokens_", "table", i) for i in range(5)),
     *(("dmc_append_", "tail", i) for i in range(4))],
)  # fmt: skip
@pytest.mark.parametrize("value", [None, [1]])
def test_a_part_of_another_kind_is_named(op, name, part, value):
    function, arguments = given()[op]
    whole = list(arguments[name])
    whole[part] = value
    kind = type(arguments[name])
    wanted = PageTable._fields[part] if name == "table" else Tail._fields[part] if name == "tail" else rf"\[{part}\]"
    with pytest.raises(TypeError, match=rf"{wanted} must be a torch.Tensor, got {type(value).__name__}"):
        function(**{**arguments, name: kind(whole) if kind in (list, tuple) else kind(*whole)})


@pytest.mark.parametrize("value", [None, [1], 3, "ab", (torch.zeros(1, 1, 1, 1),)])
def test_states_that_are_none_are_named(value):
    good = (torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1))
    with pytest.raises((TypeError, ValueError), match=r"states\[1\] must be"):
        ops.merge_states(good, value)
    for wrong, name in (((good[0], None), "lse"), (([0], good[1]), "out")):
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor"):
            ops.merge_states(good, wrong)


@pytest.mark.parametrize("far", ["none", "led"])
@pytest.mark.parametrize("name", ["probabilities", "far_lse"])
@pytest.mark.parametrize("value", [[1.0], 1.5, "x", (1, 2, 3)])
def test_what_a_step_of_pod_does_not_look_at_is_a_tensor_too(far, name, value):
    function, arguments = given()["pod_step_that_is_led" if far == "led" else "pod_step_"]
    with pytest.raises(TypeError, match=rf"^{name} must be a torch.Tensor, got {type(value).__name__}"):
        function(**arguments | {"far": far, name: value})


STEPS = [op for op in given() if op in ("paged_step_", "quest_step_", "dmc_step_", "ring_step_", "pod_step_")]


@pytest.mark.parametrize("op", STEPS)
def test_a_step_names_arguments_that_it_does_not_take_or_misses(op):
    function, arguments = given()[op]
    with pytest.raises(TypeError, match=rf"^{op}\(\) got an unexpected keyword argument 'sinsk'"):
        function(**arguments, sinsk=4)
    with pytest.raises(TypeError, match=rf"^{op}\(\) missing 1 required positional argument: 'values'"):
        function(**{name: x for name, x in arguments.items() if name != "values"})


@pytest.mark.parametrize("op", STEPS)
def test_a_step_of_no_heads_is_refused(op):
    """Nobody would ask, and the token would not be stored."""
    function, arguments = given()[op]
    none = {
        "queries": arguments["queries"][:, :0],
        "sink_logits": None,
        "far_lse": None,
        "probabilities": None,
        "far": "none",
    }
    with pytest.raises(ValueError, match="Hkv dividing Hq = 0"):
        function(**arguments | {name: x for name, x in none.items() if name in arguments})


@pytest.mark.parametrize("op", STEPS)
def test_a_step_of_no_sequences_is_refused(op):
    function, arguments = given()[op]
    none = {name: arguments[name][:0] for name in ("queries", "keys", "values")}
    with pytest.raises(ValueError, match="must have B\\*Hkv rows with B = 0"):
        function(**arguments | none)


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in STEPS for name, x in given()[op][1].items() if isinstance(x, torch.Tensor)]
)
def test_a_tensor_without_storage_among_others_is_refused(op, name):
    """PyTorch takes such a call to the op's fake, which knows no values."""
    function, arguments = given()[op]
    with pytest.raises(ValueError, match="meta"):
        function(**arguments | {name: arguments[name].to("meta")})


def test_the_table_of_a_lead_has_two_dimensions():
    function, arguments = given()["pod_step_that_is_led"]
    lead = arguments["lead"]._replace(block_table=torch.zeros(2, dtype=ints))
    with pytest.raises(ValueError, match=r"lead.block_table must be \[R, blocks\], got \(2,\)"):
        function(**arguments | {"lead": lead})


def plain_calls():
    """Ops with numbers beside tensors."""
    x, near = torch.randn(1, 2, 3, 4), (torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1))
    ends = torch.ones(2, dtype=ints)
    shared = {"near": near, "probabilities": torch.rand(1, 2, 4), "far_lse": near[1], "v_pages": torch.zeros(4, 4, 4),
              "begin": 0 * ends, "end": ends, "block_table": torch.zeros(2, 1, dtype=ints)}  # fmt: skip
    sizes = {"total": 4, "kept": [1], "stored": [2], "lowest": [0], "highest": [9]}
    return {
        "attention": {"queries": x, "keys": x, "values": x, "window": 2, "sinks": 1, "scale": 1.0, "softcap": 9.0},
        "decode_shared": shared | {"tau": 0.5},
        "divide_memory": sizes,
        "truncate_rows_": {"table": table(), "new_lengths": 0 * ends, "page_size": 4},
        "window_scores": {"queries": x[:, :, :1], "keys": x, "kernel_size": 1, "skip_last": 1, "scale": 1.0},
    }


NUMBERS = [("attention", "window"), ("attention", "sinks"), ("attention", "scale"), ("attention", "softcap"),
           ("decode_shared", "tau"), ("divide_memory", "kept"), ("divide_memory", "highest"),
           ("truncate_rows_", "page_size"), ("window_scores", "kernel_size"), ("window_scores", "scale")]  # fmt: skip
NOT_NUMBERS = [(*number, value) for number in NUMBERS for value in ("x", {}, True, [[1.0]], float("nan"))]


@pytest.mark.parametrize(("op", "name", "value"), [*NOT_NUMBERS, ("truncate_rows_", "page_size", 1 << 40)])
def test_what_is_no_such_number_is_named(op, name, value):
    arguments = plain_calls()[op]
    getattr(ops, op)(**arguments)
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b.* must"):
        getattr(ops, op)(**arguments | {name: value})


def good_calls():
    x, pages, end = torch.randn(1, 2, 3, 4), torch.zeros(2, 4, 4), torch.ones(2, dtype=ints)
    plain = plain_calls() | {
        "decode": {"queries": x, "k_pages": pages, "v_pages": pages, "end": end},
        "quantize": {"x": x, "format": "int8"},
    }
    return given() | {op: (getattr(ops, op), arguments) for op, arguments in plain.items()}


@pytest.mark.parametrize("name", ["key_scales", "value_scales"])
def test_scales_that_are_no_tensors_are_named(name):
    codes, end = torch.zeros(2, 4, 4, dtype=torch.int8), torch.ones(2, dtype=ints)
    scales = {"key_scales": torch.ones(2, 4).half(), "value_scales": torch.ones(2, 4).half(), name: [1.0]}
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
        ops.decode(torch.randn(1, 2, 1, 4), codes, codes, end, **scales)


CHECKS = {op: inspect.getclosurevars(function).nonlocals.get("check") for op, (function, _) in good_calls().items()}


@pytest.mark.parametrize("op", [op for op, check in CHECKS.items() if check])
def test_the_binding_alone_looks_at_a_good_call(op):
    function, arguments = good_calls()[op]
    seen = set()
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code))
    function(**arguments)
    sys.setprofile(None)
    assert function.__wrapped__.__code__ in seen and CHECKS[op].__code__ not in seen


def test_ops_that_take_more_than_numbers_are_explained():
    plain = {op for op, check in CHECKS.items() if check is None}
    assert plain == {"divide_memory", "dmc_decisions", "dmc_importance", "dmc_mask"}


WITHOUT_VALUES = ["rope", "select_topk", "append_tokens_", "truncate_rows_", "compact_pages_", "dmc_accumulate",
                  "dmc_append_", "attention", "decode", "decode_shared", "window_scores"]  # fmt: skip


@pytest.mark.parametrize("op", WITHOUT_VALUES)
def test_tensors_without_storage_are_looked_at(op):
    """By the op's fake, which stands for the binding while torch.compile traces, too."""
    function, arguments = good_calls()[op]
    meta = mapped(arguments, lambda x: x.to("meta"))
    function(**meta)
    for name, x in meta.items():
        if x is not None and not isinstance(x, (int, float, str)):
            more = mapped(x, lambda part: part[None])
            with pytest.raises(ValueError, match=r" must | need "):
                function(**meta | {name: more})
