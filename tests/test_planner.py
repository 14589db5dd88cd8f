import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress import ops, plan, reference


@given(length=st.integers(0, 5000), chunk=st.integers(1, 700), memory=st.integers(1, 900))
def test_fixed_plan_as_the_reference(length, chunk, memory):
    ours = plan(length, chunk_size=chunk, memory_size=memory)
    assert (list(ours.chunks), list(ours.memory), list(ours.stored)) == reference.plan(length, chunk, memory)


@given(length=st.integers(1, 5000), chunk=st.integers(1, 700), memory=st.integers(1, 900))
def test_chunks_sum_to_the_prompt_and_memory_never_exceeds_what_was_seen(length, chunk, memory):
    ours = plan(length, chunk_size=chunk, memory_size=memory)
    assert sum(ours.chunks) == length
    assert min(ours.chunks) >= 1
    assert len(ours) == -(-length // chunk)
    seen = torch.tensor(ours.chunks).cumsum(0).tolist()
    assert all(stored <= min(memory, end) for stored, end in zip(ours.stored, seen, strict=True))
    assert ours.stored[-1] == min(memory, length)
    assert ours.largest_context <= memory + chunk


def test_empty_prompt_has_an_empty_plan():
    assert len(plan(0, chunk_size=4, memory_size=4)) == 0
    assert plan(0, chunk_size=4, memory_size=4).largest_context == 0


def test_worked_example():
    ours = plan(32, chunk_size=8, memory_size=8)
    assert ours.chunks == (8, 8, 8, 8)
    assert ours.memory == (8, 8, 8, 8)
    assert ours.largest_context == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_length": -1}, "prompt_length must be at least 0, got -1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"memory_size": 0}, "memory_size must be at least 1, got 0"),
        ({"schedule": "cubic"}, "schedule must be one of fixed"),
    ],
)
def test_wrong_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(**{"prompt_length": 10, "chunk_size": 4, "memory_size": 4, **arguments})


@pytest.mark.parametrize("schedule", ops.SCHEDULES[1:])
def test_a_schedule_that_is_not_there_says_so(schedule):
    with pytest.raises(
        RuntimeError, match=f"^plan: the schedule {schedule} is not implemented yet; implemented: fixed$"
    ):
        plan(10, chunk_size=4, memory_size=4, schedule=schedule)
