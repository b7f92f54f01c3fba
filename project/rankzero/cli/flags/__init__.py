"""The short flags: their table, the readers of their values, and a parser. Does not import torch."""
