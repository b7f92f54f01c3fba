from math import isnan
from types import SimpleNamespace

import pytest
import torch

from rankzero.tracking.measurements import series
from rankzero.tracking.measurements.exchange import Exchange
from rankzero.tracking.measurements.series import (
    ALWAYS_EXCHANGED,
    DATA_WAIT,
    EXCHANGED,
    GRADIENT_NORM,
    LOSS_SUM,
    combine,
)


class Ranks:
    """Stands for a strategy: values of rank one are twice those of rank zero, and arrive when a test says so."""

    root_device = torch.device("cpu")

    def __init__(self):
        self.begun = []

    def begin_gather_rows(self, row):
        rows = torch.stack([row, 2 * row])
        self.begun.append(SimpleNamespace(is_complete=False, wait=lambda: rows))
        return self.begun[-1]


def test_values_arrive_in_the_order_of_their_tags():
    ranks = Ranks()
    exchange = Exchange(ranks, 2)
    exchange.begin({LOSS_SUM: torch.tensor(3.0), GRADIENT_NORM: 4.0, series.DETAILS_REQUESTED: 0.0, DATA_WAIT: 5.0})
    assert exchange.is_begun and not exchange.is_complete
    (rows,) = ranks.begun
    rows.is_complete = True
    assert exchange.is_complete
    rows = exchange.finish()
    assert not exchange.is_begun
    assert [row[EXCHANGED.index(LOSS_SUM)] for row in rows] == [3.0, 6.0]
    assert [row[EXCHANGED.index(DATA_WAIT)] for row in rows] == [5.0, 10.0]
    assert isnan(rows[0][EXCHANGED.index("workload/host_memory_gib")])
    assert combine(rows)[LOSS_SUM] == 9.0 and combine(rows)[GRADIENT_NORM] == 8.0


def test_a_single_process_on_the_cpu_exchanges_nothing():
    ranks = Ranks()
    exchange = Exchange(ranks, 1)
    exchange.begin({LOSS_SUM: 3.0, series.DETAILS_REQUESTED: 0.0})
    assert exchange.is_complete and not ranks.begun
    values = combine(exchange.finish())
    assert values[LOSS_SUM] == 3.0 and isnan(values[GRADIENT_NORM])


@pytest.mark.parametrize("world_size", [1, 2])
def test_rank_zero_requests_details_one_exchange_ahead(world_size):
    exchange = Exchange(Ranks(), world_size)
    has_details = []
    for request in (0.0, 1.0, 0.0, 0.0):
        has_details.append(exchange.has_details)
        exchange.begin({series.DETAILS_REQUESTED: request})
        assert len(exchange.finish()[0]) == len(EXCHANGED if has_details[-1] else ALWAYS_EXCHANGED)
    assert has_details == [True, False, True, False]
