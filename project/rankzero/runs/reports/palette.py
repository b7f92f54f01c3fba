"""Colors of curves in all figures. Does not import torch."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
"""The palette of Okabe and Ito, which color-blind people can distinguish; yellow, the faintest on white, comes last."""

BRIGHT_COLORS = COLORS[:6]
"""The palette without black, the color of texts, and without yellow."""
