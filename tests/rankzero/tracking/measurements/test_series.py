import re
from math import isnan, nan

from rankzero.tracking.measurements import series
from rankzero.tracking.measurements.series import DATA_WAIT, FIRST_GRADIENT, GRADIENT_NORM, LOSS_SUM, combine
from running import REPOSITORY


def row(**values):
    names = {"wait": DATA_WAIT, "gradient": FIRST_GRADIENT, "norm": GRADIENT_NORM, "loss": LOSS_SUM}
    by_tag = {names[name]: value for name, value in values.items()}
    return [by_tag.get(tag, nan) for tag in series.EXCHANGED]


def test_values_of_the_ranks_that_have_one_are_summed_averaged_or_the_largest_is_taken():
    combined = combine([row(wait=1.0, norm=3.0, loss=5.0), row(wait=2.0, norm=4.0, loss=6.0)])
    assert (combined[DATA_WAIT], combined[GRADIENT_NORM], combined[LOSS_SUM]) == (1.5, 4.0, 11.0)
    combined = combine([row(wait=1.0, loss=0.0), row(loss=0.0)])
    assert combined[DATA_WAIT] == 1.0 and isnan(combined[GRADIENT_NORM])
    assert isnan(combine([row(loss=nan), row(loss=6.0)])[LOSS_SUM])  # a sum is a number only if all parts are
    assert list(combine([row(norm=2.0, loss=1.0)[: len(series.ALWAYS_EXCHANGED)]])) == list(series.ALWAYS_EXCHANGED)


def test_each_rank_or_each_of_the_slowest_has_a_series_and_slow_ranks_are_marked():
    values = series.values_of_ranks([row(wait=1.0, gradient=10.0), row(wait=2.0, gradient=30.0)], slow_ranks=[1])
    waits = {"world/data_wait_ms/rank_000": 1.0, "world/data_wait_ms/rank_001": 2.0}
    gradients = {"rank_000": 10.0, "rank_001": 30.0, "slow_rank_001": 30.0}
    assert values == waits | {f"{FIRST_GRADIENT}/{name}": value for name, value in gradients.items()}
    values = series.values_of_ranks([row(wait=float(rank)) for rank in range(100)], slow_ranks=[])
    assert list(values) == [f"world/data_wait_ms/rank_{rank:03d}" for rank in range(100 - series.MAX_RANKS, 100)]


def test_every_logged_series_is_documented_and_has_a_description_with_its_unit():
    units = {"ms": "Milliseconds", "s": "Seconds", "gib": "GiB", "mib": "MiB", "percent": "percentage", "norm": "norm"}
    for tag, described in series.SERIES.items():
        if "/" in tag:
            unit = tag.rpartition("_")[2]
            assert described.description and units.get(unit, "") in described.description, tag
    text = (REPOSITORY / "docs/tensorboard.md").read_text()
    documented = set(re.findall(r"`((?:train|wall_time|weights|workload|world|x_axis)/\w+)", text))
    logged = {tag for tag in series.SERIES if "/" in tag} | set(series.RANK_SERIES.values())
    assert documented - {"train/lr", "train/mean_loss"} == logged
