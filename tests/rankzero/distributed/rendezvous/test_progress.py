import pytest

from rankzero.distributed.rendezvous import progress
from rankzero.distributed.rendezvous.progress import Progress


def test_progress_is_printed_at_intervals(monkeypatch, capsys):
    waiting = Progress(20)
    waiting.print_if_due(lambda: pytest.fail("it is too early"))
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", -1)
    waiting.print_if_due(lambda: "missing rank 1")
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 10)
    waiting.print_if_due(lambda: pytest.fail("it is too early again"))
    assert capsys.readouterr().err.startswith("rankzero: waiting: missing rank 1; ")
