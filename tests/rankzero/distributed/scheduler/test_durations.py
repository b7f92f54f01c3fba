import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.distributed.scheduler.durations import parse_duration


def test_durations_in_slurms_formats_and_with_units_are_parsed():
    seconds = {"90": 5400, "30:00": 1800, "90:05": 5405, "01:30:00": 5400, "1-0": 86400, "1-12": 129600}
    seconds |= {"1-12:30": 131400, "2-00:00:01": 172801, "90s": 90, "15min": 900, "2h": 7200}
    assert {text: parse_duration(text) for text in seconds} == seconds


@pytest.mark.parametrize("text", ["", "0", "0:00", "0s", "-5", "1:2:3:4", "1:60", "1.5h", "2d", "٣", "UNLIMITED", "1-"])
def test_invalid_durations_are_refused(text):
    with pytest.raises(ValueError, match="a time"):
        parse_duration(text)


@given(st.integers(1, 10**8))
def test_formatted_durations_are_parsed_to_the_same_seconds(seconds):
    days, rest = divmod(seconds, 86400)
    assert parse_duration(f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}") == seconds
