"""Parts of a progress bar on one line of a terminal: less important parts are left out if the line is too narrow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import ProgressColumn
from rich.text import Text

SEPARATOR = "  "
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 6, 30


@dataclass(frozen=True)
class Part:
    """One part of a line.

    Attributes:
        text: The text; empty for the bar.
        importance: Parts with larger numbers are left out first.
        style: Style of the text, as rich defines it.
    """

    text: str
    importance: int
    style: str = ""


def fitting(parts: Sequence[Part], columns: int) -> list[Part]:
    """Returns the parts that fit into a line, in their order; important parts take precedence over earlier ones."""
    chosen: set[int] = set()
    used = 0
    for number in sorted(range(len(parts)), key=lambda number: parts[number].importance):
        needed = (cell_len(parts[number].text) or MIN_BAR_COLUMNS) + len(SEPARATOR) * bool(chosen)
        if used + needed <= columns or not chosen:
            chosen.add(number)
            used += needed
    return [part for number, part in enumerate(parts) if number in chosen]


@dataclass
class Line:
    """A line for a terminal, which is at most as wide as the terminal.

    Attributes:
        parts: The parts in their order.
        fraction: Filled fraction of the bar; None for an unknown total, which leaves the bar out.
        bar_style: Style of the filled part of the bar.
    """

    parts: Sequence[Part] = ()
    fraction: float | None = None
    bar_style: str = ""

    def text(self, console: Console, options: ConsoleOptions) -> Text:
        """Returns the line for a terminal; its last column stays free, because some terminals wrap after it."""
        columns = max(1, options.max_width - 1)
        candidates = [part for part in self.parts if part.text or self.fraction is not None]
        parts = fitting(candidates, columns)
        used = sum(cell_len(part.text) for part in parts) + len(SEPARATOR) * (len(parts) - 1)
        bar_columns = min(columns - used, MAX_BAR_COLUMNS)
        pieces = [
            Text(part.text, part.style) if part.text else self._bar(bar_columns, console, options) for part in parts
        ]
        overflow: Literal["crop", "ellipsis"] = "crop" if options.ascii_only else "ellipsis"
        line = Text(SEPARATOR, no_wrap=True, overflow=overflow, end="").join(pieces)
        line.truncate(columns, overflow=overflow)
        return line

    def _bar(self, columns: int, console: Console, options: ConsoleOptions) -> Text:
        filled = round(min(1.0, max(0.0, self.fraction or 0.0)) * columns)
        character = "-" if options.ascii_only else "━"
        has_colors = console.color_system is not None and not console.no_color
        rest = (character if has_colors else " ") * (columns - filled)
        return Text.assemble((character * filled, self.bar_style), (rest, "bar.back"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text(console, options)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        columns = self.text(console, options).cell_len
        return Measurement(columns, columns)


class LineColumn(ProgressColumn):
    """The only column of a progress bar: it shows the line that was last set for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, Line] = {}

    def render(self, task: Any) -> Line:
        return self.lines.get(task.id, Line())
