import accuracy
import oracle
import pytest
import torch
from accuracy import assert_within
from backends import BACKENDS
from helpers import DTYPES, covering

from kvcompress import ops


def tables(rows: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(half) / max(half, 1))
    return angles.cos(), angles.sin()


SIZES = [
    (1, 1, 1, 16, 16), (2, 3, 17, 64, 64), (1, 2, 5, 80, 32), (2, 1, 9, 6, 6), (1, 2, 3, 34, 34), (2, 1, 7, 33, 20),
    (1, 1, 2, 8, 0), (1, 8, 70, 256, 256),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "sizes", "backend"), covering(DTYPES, SIZES, BACKENDS), indirect=["backend"])
def test_rotates_as_the_reference(backend, dtype, sizes):
    B, H, T, D, rotary = sizes
    x = torch.randn(B, H, T, D).to(dtype)
    cos, sin = tables(200, rotary // 2)
    positions = torch.randint(0, 200, (B, T), dtype=torch.int32)
    for inverse in (False, True):
        exact = oracle.rope(x.double(), cos.double(), sin.double(), positions, inverse=inverse)
        found = ops.rope(x, cos, sin, positions, inverse=inverse)
        assert_within(found, exact, accuracy.rope(x, cos, sin, positions))


def test_strided_input_is_rotated_in_place_of_a_copy(backend):
    x = torch.randn(2, 7, 3, 32).transpose(1, 2)  # as projections give it
    cos, sin = tables(7, 16)
    torch.testing.assert_close(ops.rope(x, cos, sin), oracle.rope(x, cos, sin))


def test_rotating_there_and_back_changes_nothing(backend):
    x = torch.randn(1, 2, 50, 64)
    cos, sin = tables(50, 32)
    torch.testing.assert_close(ops.rope(ops.rope(x, cos, sin), cos, sin, inverse=True), x, atol=1e-6, rtol=0)


def test_a_key_moves_by_the_rotation_of_the_difference(backend):
    x = torch.randn(1, 2, 20, 64)
    cos, sin = tables(100, 32)
    there = torch.arange(30, 50, dtype=torch.int32)[None]
    moved = ops.rope(ops.rope(x, cos, sin, there), cos, sin, torch.full_like(there, 30), inverse=True)
    torch.testing.assert_close(moved, ops.rope(x, cos, sin), atol=1e-5, rtol=0)


def test_gradient_is_the_references(backend):
    x = torch.randn(2, 3, 5, 16)
    cos, sin = tables(9, 8)
    positions = torch.randint(0, 9, (2, 5), dtype=torch.int32)
    weight = torch.randn_like(x)
    ours, plain = x.clone().requires_grad_(), x.double().requires_grad_()
    (ops.rope(ours, cos, sin, positions) * weight).sum().backward()
    (oracle.rope(plain, cos.double(), sin.double(), positions) * weight.double()).sum().backward()
    torch.testing.assert_close(ours.grad.double(), plain.grad, atol=1e-6, rtol=0)


def test_reference_passes_gradcheck():
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (table.double() for table in tables(3, 4))
    assert torch.autograd.gradcheck(lambda y: oracle.rope(y, cos, sin), (x,))


def test_opcheck():
    cos, sin = tables(9, 8)
    x = torch.randn(2, 3, 5, 16, requires_grad=True)
    positions = torch.randint(0, 9, (2, 5), dtype=torch.int32)
    torch.library.opcheck(torch.ops.kvcompress.rope, (x, cos, sin, positions, False))


def test_empty_input_gives_empty_output(backend):
    cos, sin = tables(4, 8)
    for shape in ((2, 3, 0, 16), (0, 2, 3, 16)):
        assert ops.rope(torch.empty(shape), cos, sin).shape == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(2, 5, 16)}, r"x must be \[B, H, T, D\]"),
        ({"x": torch.randn(1, 1, 5, 16, dtype=torch.float64)}, "x must be float32, bfloat16 or float16"),
        ({"cos": torch.ones(9, 4)}, "cos and sin must be|sin must be"),
        ({"cos": torch.ones(9, 12), "sin": torch.ones(9, 12)}, "rotate 24 dimensions"),
        ({"positions": torch.zeros(1, 5, dtype=torch.int64)}, "positions must be int32"),
        ({"positions": torch.zeros(1, 4, dtype=torch.int32)}, "positions must have shape"),
        ({"cos": torch.ones(3, 8), "sin": torch.ones(3, 8)}, "need 5 rows"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    cos, sin = tables(9, 8)
    arguments = {"x": torch.randn(1, 1, 5, 16), "cos": cos, "sin": sin, **change}
    with pytest.raises(ValueError, match=message):
        ops.rope(**arguments)


@pytest.mark.parametrize("place", [-1, 9])
def test_position_outside_the_tables_is_refused(place):
    cos, sin = tables(9, 8)
    message = rf"^rope: positions must be between 0 and 8 \(last row of cos and sin\), got {place} at \[0, 1\]$"
    with pytest.raises(RuntimeError, match=message):
        ops.rope(torch.randn(1, 1, 2, 16), cos, sin, torch.tensor([[0, place]], dtype=torch.int32))


def test_position_outside_the_tables_gives_nan_in_the_rotated_part_of_its_token(cuda):
    x, (cos, sin) = torch.randn(1, 2, 3, 16), tables(4, 4)
    out = ops.rope(x, cos, sin, torch.tensor([[0, 4, -1]], dtype=torch.int32))
    assert torch.equal(out[:, :, 0], x[:, :, 0])
    assert out[:, :, 1:, :8].isnan().all()
    assert torch.equal(out[..., 8:], x[..., 8:])
