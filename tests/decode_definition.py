"""What ops.decode is to give, for its tests."""

import accuracy
import oracle
import torch
from accuracy import assert_within

from kvcompress import ops


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def check(queries, k, v, end, **options):
    exact = oracle.decode(queries.double(), k, v, end, **options)
    ours = ops.decode(queries, k, v, end, **options)
    softmax, values = accuracy.of_pages(queries, k, v, end, **options)
    assert_within(ours[0], exact[0], softmax.out_error(values, queries.dtype), "out")
    assert ours[1].dtype == torch.float32
    assert_within(ours[1], exact[1], softmax.lse_error(), "lse")
