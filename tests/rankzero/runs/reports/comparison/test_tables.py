import pytest

from rankzero.runs.reports.comparison.results import Result
from rankzero.runs.reports.comparison.settings import Difference
from rankzero.runs.reports.comparison.tables import distinct, print_comparison


@pytest.mark.parametrize("runs", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal_and_shorten_no_number(capsys, monkeypatch, runs, width):
    monkeypatch.setenv("COLUMNS", str(width))
    labels = [f"resnet50-imagenet-with-a-long-name-seed{number}" for number in range(runs)]
    settings = [Difference("model.optimizer.a_very_long_name.lr", [f"0.{number}" * 20 for number in range(runs)])]
    samples = [f"{number + 1:,}" for number in range(123_456_789, 123_456_789 + runs)]
    print_comparison(labels, settings, [Result("samples", samples, frozenset({runs - 1}))])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert all(any(sample in line for line in lines) for sample in samples)
    assert any(f"{samples[-1]}*" in line for line in lines)
    assert all(any(f"seed{number}" in line for line in lines) for number in range(runs))


def test_equal_settings_are_said_and_unknown_ones_are_not_and_names_equal_when_shortened_are_numbered(
    capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    print_comparison(["a", "b"], [], [Result("steps", ["1", "2"])])
    assert "all settings are equal" in capsys.readouterr().out
    print_comparison(["a", "b"], None, [Result("steps", ["1", "2"])])
    assert "settings" not in capsys.readouterr().out
    names = ["resnet-lr0.1-seed1", "resnet-lr0.3-seed1"]
    assert distinct(names, 20) == names
    assert distinct(names, 9) == ["1 res…ed1", "2 res…ed1"]
