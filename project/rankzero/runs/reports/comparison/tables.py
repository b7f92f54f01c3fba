"""Tables of a comparison. Does not import torch."""

from collections.abc import Sequence

from rich.cells import cell_len

from rankzero.messages import print_line
from rankzero.runs.reports.comparison.results import Result
from rankzero.runs.reports.comparison.settings import Difference
from rankzero.runs.reports.table import Column, Row, available_width, print_table
from rankzero.runs.reports.text import distinct

_MAX_LABEL, _MIN_VALUE = 24, 13
"""Most columns for the names of settings and results, and least columns for the values of a run."""


def print_comparison(labels: Sequence[str], settings: Sequence[Difference] | None, rows: Sequence[Result]) -> None:
    """Prints the settings in which runs differ, and their results. Runs that do not fit have further tables.

    Args:
        labels: Names of the runs.
        settings: Settings in which the runs differ; None if they cannot be compared.
        rows: Results of the runs.
    """
    setting_rows = [Row([setting.name, *setting.values]) for setting in settings or ()]
    if setting_rows:
        _print_blocks("setting", labels, setting_rows, is_number=False)
    elif settings is not None:
        print_line("all settings are equal\n")
    has_best = any(row.best for row in rows)
    _print_blocks("result", labels, [_row(row, has_best) for row in rows], is_number=True)
    if has_best:
        print_line("* best value of all runs")


def _print_blocks(title: str, labels: Sequence[str], rows: Sequence[Row], is_number: bool) -> None:
    label_width = min(_MAX_LABEL, max(cell_len(text) for text in [title, *(row.cells[0] for row in rows)]))
    room = max(_MIN_VALUE, available_width() - label_width)
    count = min(len(labels), max(1, room // (_MIN_VALUE + 2)))
    names = distinct(labels, max(_MIN_VALUE, room // count - 2))
    for begin in range(0, len(labels), count):
        block = range(begin, min(begin + count, len(labels)))
        columns = [Column(title, label_width), *(Column(names[index], _MIN_VALUE, is_number) for index in block)]
        cells = [
            Row(
                [row.cells[0], *(row.cells[index + 1] for index in block)],
                styles={index - begin + 1: row.styles[index + 1] for index in block if index + 1 in row.styles},
            )
            for row in rows
        ]
        print_table(columns, cells)
        print_line("")


def _row(row: Result, has_best: bool) -> Row:
    marks = ["*" if index in row.best else " " * has_best for index in range(len(row.values))]
    cells = [row.name, *(value + mark for value, mark in zip(row.values, marks, strict=True))]
    return Row(cells, styles={index + 1: "bold green" for index in row.best})
