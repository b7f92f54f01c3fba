"""TensorBoard files of a run: writing and reading."""
