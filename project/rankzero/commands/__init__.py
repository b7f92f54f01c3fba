"""What a person runs: `fit`, `evaluate`, `predict`, `explain`."""
