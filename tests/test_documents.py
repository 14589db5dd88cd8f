"""Documents of a batch in groups of about the same length, and back."""

import pytest
import torch

from kvcompress.hf.documents import ALIKE, SHORT, Documents


@pytest.mark.parametrize("lengths", [[300, 200, 12], [1, 511], [128] * 4, [65, 64, 63, 62, 258], [512]])
def test_groups_hold_every_token_once_and_little_else(lengths):
    x = torch.randn(2, 3, sum(lengths), 4)  # the second row is one document, padded
    mask = torch.ones(2, sum(lengths), dtype=torch.long)
    mask[1, 400:] = 0
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]), torch.arange(sum(lengths))])
    documents = Documents.of(mask, positions, 2, sum(lengths))
    assert sorted(documents.lengths) == sorted([*lengths, 400])
    assert sorted(n for group in documents.groups for n in group.lengths) == sorted([*lengths, 400])
    for group in documents.groups:
        longest = group.source.shape[1]
        assert longest == max(group.lengths)
        assert longest <= SHORT or all(n >= ALIKE * longest for n in group.lengths)
        for row, n in zip(group.source, group.lengths, strict=True):
            first = int(row[0])
            assert row[:n].tolist() == list(range(first, first + n)) and set(row[n:].tolist()) <= {first}
    assert torch.equal(documents.within[mask != 0], positions[mask != 0])
    back = documents.join([group.split(x) for group in documents.groups])
    assert torch.equal(back, x.masked_fill(mask[:, None, :, None] == 0, 0))
