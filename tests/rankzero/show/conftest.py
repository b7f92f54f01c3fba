import pytest


@pytest.fixture
def tick_after_every_batch(monkeypatch):
    for module in ("hooks", "loop"):
        monkeypatch.setattr(f"rankzero.training.{module}.TICK_SECONDS", 0)
