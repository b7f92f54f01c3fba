import pytest

from rankzero.runs.reports.text import age, compact, duration, number_text, rough_duration, shortened


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("short", 10, "short"),
        ("resnet-with-a-long-name-seed1", 13, "resnet…-seed1"),
        ("a\nb\x1b[0m", 10, "a?b?[0m"),
        ("漢字漢字漢字", 7, "漢字…字"),
        ("abcdefgh", 4, "abcd"),
        ("abcdefgh", 0, ""),
    ],
)
def test_long_texts_lose_their_middle_and_control_characters(text, width, expected):
    assert shortened(text, width) == expected


TIMES = {
    age: [(-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (86400 * 5, "5 d"), (86400 * 4000, "4000 d")],
    duration: [
        *((None, "-"), (12.54, "12.5 s"), (59.96, "1 min 0 s"), (310, "5 min 10 s"), (7500, "2 h 5 min")),
        (4e6, "1,111 h 6 min"),
    ],
    rough_duration: [
        *((0, "0 s"), (44.6, "45 s"), (59.4, "59 s"), (59.6, "1 min"), (600, "10 min"), (3569, "59 min")),
        *((3571, "1 h 00 min"), (7500, "2 h 05 min"), (172_740, "47 h 59 min"), (172_800, "2 d 00 h")),
        (273_600, "3 d 04 h"),
    ],
}


@pytest.mark.parametrize("format_time", TIMES)
def test_times_have_one_or_two_units(format_time):
    for seconds, expected in TIMES[format_time]:
        assert format_time(seconds) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        *((None, "-"), (0, "0"), (1.25, "1.2"), (9.97, "10"), (460, "460"), (9999, "9999"), (12_345, "12.3k")),
        *((999_960, "1.0M"), (123_456_789, "123M"), (1.2e9, "1.2G"), (float("nan"), "?"), (9e15, "9000T")),
    ],
)
def test_counts_have_at_most_five_characters(number, expected):
    assert compact(number) == expected and len(expected) <= 5


def test_metrics_have_four_significant_digits():
    values = {
        0.98765: "0.9877",
        1e-9: "1e-09",
        None: "-",
        1234.5: "1,234",
        -56789.4: "-56,789",
        2e12: "2e+12",
        0.0: "0",
    }
    assert [number_text(value) for value in values] == list(values.values())
    assert {number_text(float(value)) for value in ("inf", "-inf", "nan")} == {"not finite"}
    assert [number_text(value, 6) for value in (0.98765432, 1234.5678, 1e6)] == ["0.987654", "1,234.57", "1,000,000"]
