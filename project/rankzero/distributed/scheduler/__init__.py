"""The scheduler's job that a run is part of."""
