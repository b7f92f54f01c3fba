import io
import os
import sys

import pytest
from rich.box import SQUARE
from rich.table import Table

from rankzero.runs.reports.table import Column, Row, column_widths, print_table, rendered


def test_the_longest_texts_are_shortened_first_none_below_its_minimum_and_none_in_a_pipe(monkeypatch, capsys):
    columns = [Column("name", 6), Column("status"), Column("other", 4)]
    rows = [Row(["n" * 30, "finished", "o" * 20])]
    assert column_widths(columns, rows, 100) == ([30, 8, 20], 2)
    assert column_widths(columns, rows, 40) == ([15, 8, 15], 1)
    assert column_widths(columns, rows, 10) == ([6, 8, 4], 1)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size(fallback))
    print_table([Column("name", 6)], [Row(["n" * 500])], title="long")
    assert "n" * 500 in capsys.readouterr().out


@pytest.mark.parametrize(("encoding", "corner"), [("utf-8", "┌"), ("ascii", "+"), ("latin-1", "+")])
def test_borders_and_texts_use_characters_that_the_terminal_can_show(monkeypatch, encoding, corner):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "12")
    table = Table(box=SQUARE)
    table.add_row("漢字")
    table.add_row("value")
    text = rendered(table, has_colors=False)
    assert text.startswith(corner) and "?" not in text.splitlines()[0]
    print_table([Column("name", 6), Column("n", is_number=True)], [Row(["first-漢字-second", "1"])])
    stream.seek(0)
    assert stream.read().splitlines()[1].startswith("fir")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "value" in rendered(table, has_colors=True)  # a notebook gets text
