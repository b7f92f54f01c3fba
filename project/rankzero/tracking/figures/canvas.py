"""Figures without pyplot, and their PNG files."""

import io
import warnings

from matplotlib.figure import Figure
from matplotlib.text import Text

STYLES = ("-", "--", ":")
COLOR_MAP = "Blues"
"""Color map of one hue whose lightness decreases steadily, so that it can be read with any color vision."""

DOTS_PER_INCH = 110


def png(figure: Figure) -> bytes:
    """Returns the figure as a PNG file; texts are shown as they are, also `$` of class names."""
    buffer = io.BytesIO()
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a name may be in any script
        figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, bbox_inches="tight", facecolor="white")
    return buffer.getvalue()
