"""Tests the code that all benchmarks share, and runs short versions of the benchmarks."""

import importlib.util
import json
import sys
from functools import partial
from itertools import count

import pytest

from running import REPOSITORY, run


@pytest.fixture
def contest(monkeypatch):
    """Imports and returns the module benchmarks/contest.py."""
    specification = importlib.util.spec_from_file_location("contest", REPOSITORY / "benchmarks/contest.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "contest", module)
    specification.loader.exec_module(module)
    return module


def test_a_contest_measures_each_candidate_equally_often_in_rotating_order(contest, tmp_path, capsys):
    calls, ticks = [], count(1)

    def measure(name: str) -> float:
        calls.append(name)
        return float(next(ticks))

    measures = {name: partial(measure, name) for name in ("ours", "other", "limited")}
    settings = {"title": "A title", "unit": "seconds", "targets": {"other": 1.5}, "limits": {"limited": 7}}
    result = contest.Comparison(name="x", measure=measures, **settings).run(2, tmp_path)
    assert calls == ["ours", "other", "limited", "other", "limited", "ours"]
    assert result["measured"] == {"ours": [1, 6], "other": [2, 4], "limited": [3, 5]}
    assert result["ratios"] == {"other": [0.5, 1.5]}
    assert json.loads((tmp_path / "x.json").read_text()) == result
    rows = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    assert "1.00 (0.50 to 1.50)" in rows["other"] and "<= 1.5 x" in rows["other"]
    assert "4.00 (3.00 to 5.00)" in rows["limited"] and "<= 7" in rows["limited"]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("start.py --pairs 1", {"start", "answer"}),
        ("sampling.py --pairs 1 --count 100000", {"first-batch", "first-batch-memory"}),
        ("step.py --pairs 1 --which two --count 1280 --epochs 2", {"step-two"}),
        ("features.py --feature monitoring --pairs 1 --steps 2 --devices 2", {"monitoring-mlp-2"}),
        ("features.py --feature tracking --pairs 1 --steps 20", {"tracking-mlp-1"}),
        ("step.py --pairs 1 --which compiled --count 1280 --epochs 2", {"step-compiled"}),
        ("resnet_step.py --pairs 1 --steps 1 --processes 1", {"resnet_step-1"}),
        ("threads.py --pairs 1 --steps 1", {"threads-2"}),
        ("checkpoint_stall.py --pairs 1 --steps 8 --width 64 --threads 1", {"checkpoint_stall-1"}),
    ],
)
def test_a_benchmark_runs(command, written, tmp_path):
    script, *flags = command.split()
    result = run("python", str(REPOSITORY / "benchmarks" / script), *flags, "--json_dir", "json", folder=tmp_path)
    assert {path.stem for path in (tmp_path / "json").iterdir()} == written
    assert "Traceback" not in result.err


@pytest.mark.system
def test_the_load_of_the_control_plane_is_measured(tmp_path):
    worlds = ("3x4", "5x1")
    command = (str(REPOSITORY / "benchmarks/control_plane.py"), "--worlds", *worlds, "--seconds", "1", "--json")
    results = json.loads(run("python", *command, folder=tmp_path).out)
    assert tuple(results) == worlds
    assert all(len(result) == 9 and result["control reports"] >= 3 for result in results.values()), results
    assert all(0 < value < 60 for result in results.values() for value in result.values()), results
