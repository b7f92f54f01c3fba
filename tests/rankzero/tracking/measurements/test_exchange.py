from math import isnan

import pytest
import torch

from rankzero.tracking.measurements.exchange import Exchange
from rankzero.tracking.measurements.series import (
    ALWAYS_EXCHANGED,
    DATA_WAIT,
    DETAILS_REQUESTED,
    EXCHANGED,
    GRADIENT_NORM,
    LOSS_SUM,
)


class Ranks:
    """Stands for a strategy: the values of rank one are twice those of rank zero."""

    root_device = torch.device("cpu")

    def __init__(self):
        self.gathered = 0

    def gather_rows(self, row):
        self.gathered += 1
        return torch.stack([row, 2 * row])


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_arrive_in_the_order_of_their_tags(world_size):
    ranks = Ranks()
    exchange = Exchange(ranks, world_size)
    values = {LOSS_SUM: torch.tensor(3.0), GRADIENT_NORM: 4.0, DETAILS_REQUESTED: 0.0, DATA_WAIT: 5.0}
    exchange.gather(values, has_details=True)
    rows = exchange.rows()
    assert exchange.combined()[LOSS_SUM] == sum(row[EXCHANGED.index(LOSS_SUM)] for row in rows)
    assert [row[EXCHANGED.index(LOSS_SUM)] for row in rows] == [3.0, 6.0][:world_size]
    assert [row[EXCHANGED.index(DATA_WAIT)] for row in rows] == [5.0, 10.0][:world_size]
    assert isnan(rows[0][EXCHANGED.index("workload/host_memory_gib")])
    assert ranks.gathered == world_size - 1  # one collective, none with one process


@pytest.mark.parametrize("world_size", [1, 2])
def test_rank_zero_requests_details_one_exchange_ahead(world_size):
    exchange = Exchange(Ranks(), world_size)
    has_details = []
    for request in (0.0, 1.0, 0.0, 0.0):
        has_details.append(exchange.has_details)
        exchange.gather({DETAILS_REQUESTED: request}, exchange.has_details)
        assert len(exchange.rows()[0]) == len(EXCHANGED if has_details[-1] else ALWAYS_EXCHANGED)
    assert has_details == [True, False, True, False]
