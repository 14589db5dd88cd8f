"""csrc/cuda/rope.cu in the emulation, against kvcompress.reference."""

import emulated
import pytest
import torch
from helpers import DTYPES, assert_as_accurate


def tables(rows: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(rows), 10000.0 ** (-torch.arange(rotary_dim // 2) / max(rotary_dim // 2, 1)))
    return angles.cos().contiguous(), angles.sin().contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "H", "T", "D", "rotary_dim"),
    [(1, 1, 1, 16, 16), (2, 3, 5, 64, 64), (1, 2, 9, 80, 32), (2, 1, 7, 33, 20), (1, 2, 3, 128, 128), (1, 1, 2, 8, 0)],
)
def test_rotation_as_the_reference(kernels, reference, dtype, B, H, T, D, rotary_dim):
    x = torch.randn(B, H, T, D).to(dtype)
    cos, sin = tables(40, rotary_dim)
    positions = torch.randint(0, 40, (B, T), dtype=torch.int32)
    for options in ({"positions": positions}, {"positions": positions, "inverse": True}, {}):
        exact = reference.rope(x.double(), cos, sin, **options)
        plain = reference.rope(x, cos, sin, **options)
        assert_as_accurate(kernels.rope(x, cos, sin, **options), plain, exact)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_every_pair_of_dtypes(kernels, reference, x_dtype, out_dtype):
    x = torch.randn(1, 2, 3, 16).to(x_dtype)
    cos, sin = tables(3, 16)
    out = kernels.rope(x, cos, sin, out=torch.empty(x.shape, dtype=out_dtype))
    exact = reference.rope(x.double(), cos, sin)
    assert_as_accurate(out, exact.to(out_dtype), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 33])
def test_in_place_on_a_strided_view_touches_nothing_else(kernels, dtype, D):
    storage = torch.randn(2, 6, 3, D + 8).to(dtype)
    before, cos_sin = storage.clone(), tables(6, 32)
    view = storage.transpose(1, 2)[..., :D]
    expected = kernels.rope(view.contiguous(), *cos_sin)
    kernels.rope(view, *cos_sin, out=view)
    assert torch.equal(view, expected)
    assert torch.equal(storage[..., D:], before[..., D:])


def test_position_outside_the_tables_gives_nan_in_the_rotated_part_of_its_token(kernels):
    x = torch.randn(1, 2, 3, 16)
    cos, sin = tables(4, 8)
    out = kernels.rope(x, cos, sin, torch.tensor([[0, 4, -1]], dtype=torch.int32))
    assert torch.equal(out[:, :, 0], x[:, :, 0])
    assert out[:, :, 1:, :8].isnan().all()
    assert torch.equal(out[..., 8:], x[..., 8:])


def test_invalid_sizes_and_empty_work(kernels):
    cos, sin = tables(4, 16)
    assert kernels.rope(torch.empty(0, 2, 3, 16), cos, sin).numel() == 0
    with pytest.raises(emulated.LaunchError) as error:
        kernels.rope(torch.randn(1, 1, 5, 16), cos, sin)  # five positions, four table rows
    assert error.value.code == emulated.INVALID_VALUE
    with pytest.raises(emulated.LaunchError):
        kernels.rope(torch.randn(1, 1, 4, 8), cos, sin)  # rotary_dim over D
