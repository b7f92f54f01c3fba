from math import isnan, nan

from rankzero.tracking.measurements.series import (
    ALWAYS_EXCHANGED,
    DATA_WAIT,
    EXCHANGED,
    FIRST_GRADIENT,
    GRADIENT_NORM,
    LOSS_SUM,
    MAX_RANKS,
    SERIES,
    combine,
    values_of_ranks,
)


def row(**values):
    names = {"wait": DATA_WAIT, "gradient": FIRST_GRADIENT, "norm": GRADIENT_NORM, "loss": LOSS_SUM}
    by_tag = {names[name]: value for name, value in values.items()}
    return [by_tag.get(tag, nan) for tag in EXCHANGED]


def test_values_of_ranks_are_summed_averaged_or_the_largest_is_taken():
    combined = combine([row(wait=1.0, norm=3.0, loss=5.0), row(wait=2.0, norm=4.0, loss=6.0)])
    assert (combined[DATA_WAIT], combined[GRADIENT_NORM], combined[LOSS_SUM]) == (1.5, 4.0, 11.0)


def test_ranks_without_a_value_do_not_count():
    combined = combine([row(wait=1.0, loss=0.0), row(loss=0.0)])
    assert combined[DATA_WAIT] == 1.0 and isnan(combined[GRADIENT_NORM])


def test_a_loss_that_is_not_a_number_on_one_rank_makes_the_sum_not_a_number():
    assert isnan(combine([row(loss=nan), row(loss=6.0)])[LOSS_SUM])


def test_rows_without_details_contain_the_first_values():
    assert list(combine([row(norm=2.0, loss=1.0)[: len(ALWAYS_EXCHANGED)]])) == list(ALWAYS_EXCHANGED)


def test_each_rank_has_a_series_and_slow_ranks_are_marked():
    values = values_of_ranks([row(wait=1.0, gradient=10.0), row(wait=2.0, gradient=30.0)], slow_ranks=[1])
    assert values == {
        "world/data_wait_ms/rank_000": 1.0,
        "world/data_wait_ms/rank_001": 2.0,
        f"{FIRST_GRADIENT}/rank_000": 10.0,
        f"{FIRST_GRADIENT}/rank_001": 30.0,
        f"{FIRST_GRADIENT}/slow_rank_001": 30.0,
    }


def test_of_many_ranks_the_slowest_ones_are_logged():
    values = values_of_ranks([row(wait=float(rank)) for rank in range(100)], slow_ranks=[])
    assert list(values) == [f"world/data_wait_ms/rank_{rank:03d}" for rank in range(100 - MAX_RANKS, 100)]


def test_every_logged_series_has_a_description_with_its_unit():
    units = {"ms": "Milliseconds", "s": "Seconds", "gib": "GiB", "mib": "MiB", "percent": "percentage", "norm": "norm"}
    for tag, series in SERIES.items():
        if "/" in tag:
            unit = tag.rpartition("_")[2]
            assert series.description and units.get(unit, "") in series.description, tag
