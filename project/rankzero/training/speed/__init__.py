"""What `--fast` and `--compile` change: memory layout, precision and compiled steps."""
