from math import inf

import pytest

from rankzero.training.validations import ValidationSchedule

SIZE, BATCHES = 8, 32


@pytest.mark.parametrize(
    ("interval", "epochs"), [(inf, 1), (8, 1), (8, 2), (3, 1), (2, 3), (5, None), (12, None), (1, 1)]
)
def test_count_and_next_validation_are_those_of_a_walk_over_all_batches(interval, epochs):
    def is_due(batch):
        epoch, number = divmod(batch - 1, SIZE)
        if epochs is None:
            return batch % interval == 0
        return (epoch + 1) % epochs == 0 and (number + 1) % min(interval, SIZE) == 0

    schedule = ValidationSchedule(SIZE, True, interval, epochs)
    due = [batch for batch in range(1, BATCHES + 1) if is_due(batch)]
    for start in range(BATCHES):
        epoch, done = divmod(start, SIZE)
        earlier = start - done
        for end in range(start, BATCHES + 1):
            assert schedule.count(epoch, earlier, done, end - earlier) == sum(start < batch <= end for batch in due)
        within_epoch = [batch - earlier for batch in due if start < batch < earlier + SIZE]
        next_batch = schedule.next_after(epoch, earlier, done)
        if interval == inf:
            assert next_batch == done + 1  # the number of batches is unknown, so that every batch may be the last
        else:
            assert [batch for batch in (next_batch,) if batch < SIZE] == within_epoch[:1]


@pytest.mark.parametrize("schedule", [ValidationSchedule(SIZE), ValidationSchedule(SIZE, True, 8, 2)])
def test_nothing_is_due_without_validations_and_in_an_epoch_without_one(schedule):
    assert schedule.count(0, 0, 0, SIZE) == 0 and schedule.next_after(0, 0, 0) == inf


def test_a_validation_at_intervals_of_time_may_be_due_after_each_batch():
    schedule = ValidationSchedule(SIZE, True, None)
    assert schedule.count(0, 0, 3, 4) == 1 and schedule.next_after(0, 0, 3) == 4
