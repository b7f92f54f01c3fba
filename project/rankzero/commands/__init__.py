"""The commands that users run: `fit`, `evaluate`, `predict`, `explain`."""
