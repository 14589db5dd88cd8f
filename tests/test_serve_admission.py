"""Which requests come in: lengths of answers, and the most pages that are held at once."""

import random

import numpy as np
import pytest

from kvcompress.serve.admission import REMEMBERED, TYPICAL, Answer, Lengths, most_pages


def test_an_answer_is_expected_to_be_as_long_as_those_that_ended():
    lengths = Lengths()
    assert lengths.left(Answer(0, 20)) == 20 and lengths.left(Answer(15, 20)) == 5
    assert lengths.left(Answer(0, 10**6)) == TYPICAL
    for written in [100, 300] * REMEMBERED:
        lengths.note(written)
    assert lengths.left(Answer(0, 10**6)) == 200 and lengths.left(Answer(0, 150)) == 150
    assert lengths.left(Answer(120, 10**6)) == 180  # of those that had more than 120
    assert lengths.left(Answer(400, 10**6)) == 400 and lengths.left(Answer(400, 500)) == 100
    assert lengths.left(Answer(500, 500)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_the_most_pages_are_those_of_a_simulation(seed):
    draw = random.Random(seed)
    requests = [(draw.randrange(1, 40), draw.randrange(1, 60)) for _ in range(12)]

    def held(at):
        return sum(pages + at / 4 for pages, left in requests if left >= at)

    pages, left = np.array(requests, dtype=float).T
    assert most_pages(lambda tokens: pages + tokens / 4, left) == pytest.approx(max(held(at) for at in range(61)))
    assert most_pages(lambda tokens: np.zeros(0), np.zeros(0)) == 0
