import shutil

import pytest

from rankzero.commands.list import main as list_main
from rankzero.commands.report import main
from rankzero.runs.directory import RunDirectory
from recorded_runs import write_curves, write_lock, write_run


def test_a_killed_run_has_a_report_of_what_it_has_logged(root, capsys):
    write_run(root / "killed", "", age=60)
    write_lock(root / "killed", pid=2**22 + 1, born=1)
    write_curves(root / "killed", {"train/loss": {9: 0.5, 19: 0.25}})
    assert main(["killed", "--root", str(root)]) == 0
    page = (root / "killed/report.html").read_text()
    assert str(root / "killed/report.html") in capsys.readouterr().out
    assert "has ended without a summary" in page and "<dt>steps</dt><dd>20</dd>" in page and "0.25" in page


@pytest.mark.parametrize(
    ("names", "instead"),
    [((), "report.py mine"), (("mien",), "report.py mine"), (("nope",), "list.py"), (("x", "y"), "report.py x")],
)
def test_an_unknown_run_is_refused_with_a_similar_name_or_the_command_that_lists_the_runs(root, capsys, names, instead):
    write_run(root / "mine")
    assert main([*names, "--root", str(root)]) == 2
    assert f"type   python launch/{instead} --root {root}\n" in capsys.readouterr().err


def test_a_run_whose_directory_was_deleted_while_it_trained_is_listed(root, capsys):
    run = RunDirectory(root / "x")
    run.begin_attempt("max_epochs: 3\n")
    shutil.rmtree(run.path)
    run.restore_record()
    assert list_main(["--root", str(root)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["x", "unknown"]
    shutil.rmtree(run.path)
    run.write_summary({"run": "x", "status": "finished", "attempts": 1, "epochs": 3, "steps": 6, "metrics": {}})
    assert "x was deleted while the run trained" in capsys.readouterr().err
    assert list_main(["--root", str(root)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["x", "finished", "3", "6"]
