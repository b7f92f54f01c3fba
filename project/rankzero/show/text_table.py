"""Prints tables that fit the terminal. Does not import torch."""

import io
import shutil
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rankzero.messages import print_line, stdout_encoding
from rankzero.text import shortened

_UNLIMITED = 10_000
"""Width of a table that is not printed on a terminal, so that no program reads shortened names."""


class Column(NamedTuple):
    """A column; its texts may be shortened to `minimum` columns, or never if that is None."""

    title: str
    minimum: int | None = None
    is_number: bool = False


class Row(NamedTuple):
    """A row."""

    cells: Sequence[str]
    style: str = ""
    styles: Mapping[int, str] = {}


def available_width() -> int:
    """Returns the width of the terminal, or of `COLUMNS`; without either, a width that limits nothing."""
    return shutil.get_terminal_size((0, 0)).columns or _UNLIMITED


def print_table(columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """Prints a table. Shortens texts in the middle, the longest first, if the table does not fit."""
    total_width = available_width()
    widths, gap = column_widths(columns, rows, total_width)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        header = Text(shortened(column.title, width), style="bold")
        table.add_column(header, justify="right" if column.is_number else "left", width=width, no_wrap=True)
    for row in rows:
        texts = [Text(shortened(cell, width)) for cell, width in zip(row.cells, widths, strict=True)]
        for index, style in row.styles.items():
            texts[index].style = style
        table.add_row(*texts, style=row.style)
    print_line(rendered(table, has_colors=True))


def column_widths(columns: Sequence[Column], rows: Sequence[Row], total_width: int) -> tuple[list[int], int]:
    """Returns the width of each column, and the columns between two of them."""
    texts = zip([column.title for column in columns], *(row.cells for row in rows), strict=True)
    widths = [max(map(cell_len, column_texts)) for column_texts in texts]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= total_width else 1
    excess = sum(widths) + gap * (len(widths) - 1) - total_width
    minima = [width if one.minimum is None else one.minimum for one, width in zip(columns, widths, strict=True)]
    while excess > 0 and (reducible := [index for index, minimum in enumerate(minima) if widths[index] > minimum]):
        widths[max(reducible, key=lambda index: widths[index])] -= 1
        excess -= 1
    return widths, gap


def rendered(table: Table, has_colors: bool) -> str:
    """Returns a table as text without a line break at its end. Its lines are not wrapped, so commands can be copied."""
    # The console must not write to stdout: it would raise an error if stdout cannot be written.
    file = io.TextIOWrapper(io.BytesIO(), encoding=stdout_encoding(), errors="replace")
    is_terminal = has_colors and Console().is_terminal
    console = Console(
        file=file, markup=False, highlight=False, width=_UNLIMITED, force_terminal=is_terminal, force_jupyter=False
    )
    console.print(table, soft_wrap=True)
    file.seek(0)
    return "\n".join(line.rstrip() for line in file.read().splitlines())
