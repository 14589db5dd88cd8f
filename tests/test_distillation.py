"""The distance to a teacher, and its gradient."""

import pytest
import torch
from torch.nn import functional

from kvcompress.retrofit import distillation
from kvcompress.retrofit.distillation import distance


@pytest.mark.parametrize("at_once", [1, 70, 1 << 20])  # numbers: rows of 23 go through alone, in threes, all
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_distance_is_that_of_its_definition(monkeypatch, at_once, dtype, tolerance):
    monkeypatch.setattr(distillation, "_ON_CPU", at_once)
    generator = torch.Generator().manual_seed(0)
    made = (3 * torch.randn(3, 9, 23, generator=generator, dtype=torch.float64) for _ in range(2))
    logits, teacher = (x.to(dtype) for x in made)
    labels = torch.randint(23, (3, 9), generator=generator)
    labels[0, :4] = labels[1, 5] = labels[2, -1] = -100
    logits.requires_grad_(True)
    found = distance(logits, teacher, labels)
    (0.7 * found.divergence).backward()
    exact = logits.detach().double().requires_grad_(True)
    counts = labels[:, 1:] != -100
    own, theirs = (x[:, :-1][counts].log_softmax(-1) for x in (exact, teacher.double()))
    divergence = functional.kl_div(own, theirs, log_target=True, reduction="sum")
    (0.7 * divergence).backward()
    nats = functional.nll_loss(own, labels[:, 1:][counts], reduction="sum")
    assert int(found.tokens) == int(counts.sum()) and not found.nats.requires_grad
    torch.testing.assert_close(found.divergence.double(), divergence, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(found.nats.double(), nats, rtol=tolerance, atol=0.0)
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


def test_shapes_that_do_not_fit_are_refused():
    logits, labels = torch.zeros(2, 5, 7), torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"teacher must have logits of the shape \(2, 5, 7\), got \(2, 5, 8\)"):
        distance(logits, torch.zeros(2, 5, 8), labels)
    with pytest.raises(ValueError, match=r"labels must be \(2, 5\), got \(2, 4\)"):
        distance(logits, logits, labels[:, :4])


def test_tokens_without_a_label_may_hold_anything():
    logits = torch.randn(1, 4, 7)
    logits[0, 1] = torch.nan
    logits.requires_grad_(True)
    labels = torch.tensor([[3, 4, -100, 5]])
    found = distance(logits, torch.ones(1, 4, 7), labels)
    found.divergence.backward()
    assert torch.isfinite(found.divergence.detach()) and int(found.tokens) == 2
    assert torch.isfinite(logits.grad).all() and not logits.grad[0, 1].any() and logits.grad[0, 2].any()


def test_a_text_of_one_token_is_no_distance():
    logits = torch.zeros(1, 1, 7, requires_grad=True)
    found = distance(logits, torch.ones(1, 1, 7), torch.zeros(1, 1, dtype=torch.int64))
    found.divergence.backward()
    assert float(found.divergence.detach()) == float(found.nats) == int(found.tokens) == 0
    assert not logits.grad.any()
