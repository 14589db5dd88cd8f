import pytest
import torch
from helpers import tiny_model
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcompress.positions import RotaryTables

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "longrope": {
        "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def scaled_model(kind):
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}
    return tiny_model(rope_parameters=parameters, max_position_embeddings=256)


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("length", [20, 300])
def test_rotates_as_the_model_does_for_that_many_keys(kind, length):
    rotary = scaled_model(kind).model.rotary_emb
    tables = RotaryTables(rotary)
    x = torch.randn(1, 2, length, 16)
    tables.rotate(torch.randn(1, 2, 500, 16), None, 500, [500])  # a longer context before must leave nothing behind
    cos, sin = scaled_model(kind).model.rotary_emb(x, torch.arange(length)[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(tables.rotate(x, None, length, [length]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", SCALINGS)
def test_unrotating_and_moving_undo_rotation(kind):
    tables = RotaryTables(scaled_model(kind).model.rotary_emb)
    x = torch.randn(1, 2, 100, 16)
    rotated = tables.rotate(x, None, 100, [100])
    torch.testing.assert_close(tables.unrotate(rotated, 100, [100]), x, atol=1e-5, rtol=1e-5)
    distance = torch.full((1, 60), 40, dtype=torch.int32)
    moved = tables.move_back(rotated[:, :, 40:], distance, 41, 100)
    torch.testing.assert_close(moved, tables.rotate(x[:, :, 40:], None, 60, [100]), atol=1e-4, rtol=1e-4)


def test_sequences_with_frequencies_of_their_own():
    tables = RotaryTables(scaled_model("dynamic").model.rotary_emb)
    x = torch.randn(2, 2, 40, 16)
    together = tables.rotate(x, None, 40, [40, 400])
    for b, length in enumerate((40, 400)):
        assert torch.equal(together[b : b + 1], tables.rotate(x[b : b + 1], None, 40, [length]))
    assert not torch.equal(tables.rotate(x[:1], None, 40, [40]), tables.rotate(x[:1], None, 40, [400]))


def test_the_models_own_embedding_is_left_alone():
    rotary = scaled_model("dynamic").model.rotary_emb
    before = rotary.inv_freq.clone()
    RotaryTables(rotary).rotate(torch.randn(1, 2, 400, 16), None, 400, [400])
    assert torch.equal(rotary.inv_freq, before)


def test_an_embedding_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="Linear is not supported"):
        RotaryTables(torch.nn.Linear(2, 2))
