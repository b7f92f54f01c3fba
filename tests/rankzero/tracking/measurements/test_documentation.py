"""Compares the documented series with those that are logged."""

import re

from rankzero.tracking.measurements.series import RANK_SERIES, SERIES
from running import REPOSITORY


def test_every_series_is_documented():
    text = (REPOSITORY / "docs/tensorboard.md").read_text()
    documented = set(re.findall(r"`((?:train|wall_time|weights|workload|world|x_axis)/\w+)", text))
    logged = {tag for tag in SERIES if "/" in tag} | set(RANK_SERIES.values())
    assert documented - {"train/lr", "train/mean_loss"} == logged
