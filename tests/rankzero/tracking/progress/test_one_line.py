import io

import pytest
from rich.console import Console

from rankzero.tracking.progress.one_line import Line, Part, fitting

IMPORTANCE = {"epoch 3/20": 0, "": 2, "step 58": 3, "train/loss: 0.123": 4, "710 samples/s": 5, "43 s left": 1}
PARTS = [Part(text, importance) for text, importance in IMPORTANCE.items()]


def rendered(line, columns):
    console = Console(file=io.StringIO(), width=columns)
    return ["".join(segment.text for segment in row).rstrip() for row in console.render_lines(line)]


def test_less_important_parts_are_left_out_first_unless_more_important_ones_do_not_fit():
    texts = [[part.text for part in fitting(PARTS, columns)] for columns in (200, 60, 40, 30, 12)]
    assert texts == [
        ["epoch 3/20", "", "step 58", "train/loss: 0.123", "710 samples/s", "43 s left"],
        ["epoch 3/20", "", "step 58", "train/loss: 0.123", "43 s left"],
        ["epoch 3/20", "", "step 58", "43 s left"],
        ["epoch 3/20", "", "43 s left"],
        ["epoch 3/20"],
    ]
    parts = [Part("epoch 1", 0), Part("x" * 50, 1), Part("step 3", 2)]
    assert [part.text for part in fitting(parts, 20)] == ["epoch 1", "step 3"]


@pytest.mark.parametrize(
    "parts", [PARTS, [Part("損失: 0.1 " * 5, 0), *PARTS], [Part("x" * 300, 0)]], ids=["usual", "wide", "too long"]
)
def test_a_line_is_never_wrapped_and_keeps_the_last_column_free(parts):
    for columns in range(1, 201):
        rows = rendered(Line(parts, 0.5), columns)
        assert len(rows) == 1, f"{columns} columns"
        assert Console(width=columns).measure(rows[0]).maximum <= max(1, columns - 1), f"{columns} columns"


def test_the_bar_is_filled_in_proportion_and_left_out_without_a_fraction():
    for fraction, text in ((0.5, "a  ━━━━━━━━━━"), (0.0, "a"), (7.0, "a  " + 19 * "━")):
        assert rendered(Line([Part("a", 0), Part("", 1)], fraction), 23) == [text]
    assert rendered(Line([Part("a", 0), Part("", 1), Part("b", 2)], None), 40) == ["a  b"]
