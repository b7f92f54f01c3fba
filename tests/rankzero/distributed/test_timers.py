import re

import pytest

from rankzero.distributed.timers import TIMERS, Timers
from running import REPOSITORY

NAMES = [name for name, value in vars(Timers).items() if isinstance(value, float)]
SOURCES = "".join(file.read_text() for file in (REPOSITORY / "project" / "rankzero").rglob("*.py"))


@pytest.mark.parametrize("factor", [1, 0.1, 1e-3, 10])
def test_the_order_of_durations_holds_at_every_scale(scale_timers, factor):
    scale_timers(factor)
    assert [reason for shorter, longer, reason in TIMERS.order() if not shorter < longer] == []
    assert TIMERS.heartbeat == 2.0 * factor


def test_the_order_finds_a_duration_that_is_too_short(monkeypatch):
    monkeypatch.setattr(TIMERS, "silence", 9.0)
    reasons = [reason for shorter, longer, reason in TIMERS.order() if not shorter < longer]
    assert reasons == ["a suspended rank is named as such"]


@pytest.mark.parametrize("name", NAMES)
def test_every_duration_is_used_and_described(name):
    assert f"TIMERS.{name}" in SOURCES
    assert re.search(rf'^    {name} = [\d.]+\n    """[^"]+[.]"""$', SOURCES, re.MULTILINE)
