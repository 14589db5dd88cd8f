"""Tests' cases in place of products: every pair of values occurs."""

import itertools

import helpers
import pytest
from helpers import covering
from hypothesis import given
from hypothesis import strategies as st

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@pytest.fixture(autouse=True, scope="module")
def asked():
    """What the option --all said; the tests are of pairs."""
    said, helpers.full_products = helpers.full_products, False
    yield said
    helpers.full_products = said


def cases(sizes):
    """Of parameters whose values are told apart: (parameter, value)."""
    return [case.values for case in covering(*([(i, v) for v in range(n)] for i, n in enumerate(sizes)))]


@given(SIZES)
def test_every_pair_of_values_of_two_parameters_occurs(sizes):
    found = cases(sizes)
    assert all([i for i, _ in case] == list(range(len(sizes))) for case in found)
    assert {value for case in found for value in case} == {(i, v) for i, n in enumerate(sizes) for v in range(n)}
    for i, j in itertools.combinations(range(len(sizes)), 2):
        pairs = {(case[i], case[j]) for case in found}
        assert pairs == set(itertools.product([(i, v) for v in range(sizes[i])], [(j, v) for v in range(sizes[j])]))


@given(SIZES)
def test_cases_are_few_and_the_same_each_time(sizes):
    found = cases(sizes)
    assert found == cases(sizes)
    assert len(set(found)) == len(found)
    first, second = [*sorted(sizes, reverse=True), 1][:2]
    assert len(found) <= 2 * first * second  # no fewer than first * second can have all pairs


@pytest.mark.parametrize("sizes", [(3, 4), (5,)])
def test_of_one_or_two_parameters_there_is_no_less_than_the_product(sizes):
    assert sorted(cases(sizes)) == sorted(itertools.product(*([(i, v) for v in range(n)] for i, n in enumerate(sizes))))


def test_a_parameter_without_values_leaves_no_case():
    assert covering([1, 2], [], [3]) == []


def test_all_asks_for_the_product(monkeypatch):
    assert len(cases([3, 4, 5, 2])) < 30
    monkeypatch.setattr(helpers, "full_products", True)
    assert sorted(cases([3, 4, 5, 2])) == sorted(set(cases([3, 4, 5, 2])))
    assert len(cases([3, 4, 5, 2])) == 120


def test_the_option_is_what_asks(pytestconfig, asked):
    assert asked == pytestconfig.getoption("--all")


def test_marks_of_values_are_the_cases():
    marked = pytest.param("a", marks=pytest.mark.gpu)
    found = covering([marked, "b"], [1, 2], [[], {}])
    assert {case.values[0] for case in found} == {"a", "b"}
    for case in found:
        assert [mark.name for mark in case.marks] == (["gpu"] if case.values[0] == "a" else [])
