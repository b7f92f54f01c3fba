import json
import math
import re

import pytest

from rankzero.runs.metrics_file import METRICS_FILE, TAIL_BYTES, Row, append_rows, cut_rows, newest_rows, read_rows
from running import disk_at


def rows_of(steps, tag="loss"):
    return [Row(step, 1e9 + step, {tag: float(step)}) for step in steps]


def line_with(name, number):
    """Returns a line of step 3 with another number."""
    line = b'{"step": 3, "epoch": 1, "samples": 9, "seconds": 5, "values": {"value": 0.5}}\n'
    return re.sub(rb'(?<="%s": )[0-9.]+' % name.encode(), number.encode(), line)


def steps_of(run):
    return [row.step for row in read_rows(run)]


def test_rows_are_read_as_they_were_appended_but_numbers_beyond_those_of_tensorboard_are_infinite_or_zero(tmp_path):
    rows = [Row(49, 1e9, {"loss": 0.5, "lr": 1e-05}, 0.25, 1600), Row(99, 1e9 + 1.5, {"loss": math.inf, "val/x": 2.0})]
    append_rows(tmp_path / "x", rows[:1], durably=True)
    append_rows(tmp_path / "x", rows[1:], durably=False)
    lines = (tmp_path / "x" / METRICS_FILE).read_text().splitlines()
    position = {"step": 49, "epoch": 0.25, "samples": 1600, "seconds": 1e9}
    assert json.loads(lines[0]) == {**position, "values": {"loss": 0.5, "lr": 1e-05}}
    assert json.loads(lines[1])["values"] == {"loss": None, "val/x": 2.0}
    first, second = read_rows(tmp_path / "x")
    assert first == rows[0]
    assert math.isnan(second.values["loss"])
    assert (second.step, second.seconds, second.values["val/x"]) == (99, 1e9 + 1.5, 2.0)
    append_rows(tmp_path, [Row(0, 1e9, {"huge": -1e300, "tiny": 1e-300, "largest": 3.4e38})], durably=False)
    (row,) = read_rows(tmp_path)
    assert row.values == {"huge": -math.inf, "tiny": 0.0, "largest": 3.4e38}


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b'{"step": 3', bytes(100), b"\xff" * 100, b"[]\n", b"7\n", b"[" * 100_000 + b"\n"),
        *(b'{"step": 3, "seconds": 1}\n', b'{"values": {}}\n'),
        *(line_with(name, number) for name in ("step", "epoch", "samples", "seconds") for number in ("1e400", "-1")),
        *(line_with(name, "9" * 400) for name in ("step", "epoch", "samples", "seconds", "value")),
        line_with("step", '"NaN"'),
        line_with("value", '"text"'),
    ],
    ids=lambda damage: str(damage[:60]),
)
def test_damaged_lines_are_left_out_and_removed_when_the_run_resumes(tmp_path, damage):
    append_rows(tmp_path, rows_of(range(3)), durably=False)
    file = tmp_path / METRICS_FILE
    intact = file.read_bytes()
    file.write_bytes(intact + damage)
    assert steps_of(tmp_path) == [row.step for row in newest_rows(tmp_path)] == [0, 1, 2]
    cut_rows(tmp_path, 3)
    assert file.read_bytes() == intact


def test_rows_from_a_step_on_are_removed_in_any_order_but_not_an_evaluation_after_the_last_step_of_training(tmp_path):
    cut_rows(tmp_path, 0)
    assert not (tmp_path / METRICS_FILE).exists()
    append_rows(tmp_path, rows_of([0, 10, 20]) + rows_of([1, 2], tag="epoch"), durably=False)
    cut_rows(tmp_path, 10)
    assert steps_of(tmp_path) == [0, 1, 2]
    assert [file.name for file in tmp_path.iterdir()] == [METRICS_FILE]
    evaluation, lost = (Row(80, 1e9, {tag: 0.5}, samples=samples) for tag, samples in (("test", 640), ("train", 648)))
    append_rows(tmp_path / "x", [*rows_of([79]), evaluation, lost], durably=False)
    cut_rows(tmp_path / "x", 80, samples=640)
    assert [list(row.values) for row in read_rows(tmp_path / "x")] == [["loss"], ["test"]]


def test_on_a_full_disk_all_rows_are_appended_or_none(tmp_path):
    with disk_at(tmp_path / "disk", "64k") as disk:
        count = 0
        with pytest.raises(OSError, match="No space left"):
            while True:
                append_rows(disk, rows_of([count]), durably=True)
                count += 1
        intact = (disk / METRICS_FILE).read_bytes()
        with pytest.raises(OSError, match="No space left"):
            append_rows(disk, rows_of(range(2000)), durably=True)
        assert (disk / METRICS_FILE).read_bytes() == intact
        assert steps_of(disk) == list(range(count))


def test_the_newest_rows_are_read_from_the_end_of_a_long_file(tmp_path):
    assert newest_rows(tmp_path) == []
    append_rows(tmp_path, rows_of(range(10_000)), durably=False)
    assert (tmp_path / METRICS_FILE).stat().st_size > 2 * TAIL_BYTES
    steps = [row.step for row in newest_rows(tmp_path)]
    assert steps == list(range(steps[0], 10_000))
    assert 1000 < len(steps) < 5000
    append_rows(tmp_path, [Row(10_000, 1e9, {f"metric {number}": 0.5 for number in range(20_000)})], durably=False)
    assert newest_rows(tmp_path)[-1].step == 10_000
