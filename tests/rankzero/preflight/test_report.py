import json

import pytest

from rankzero.messages import Exit
from rankzero.preflight.check import CHECK_NAMES, FAIL, OK, SKIPPED, WARN, Check, Report


def read(file):
    content = json.loads(file.read_text())
    return content, {check["name"]: check["status"] for check in content["checks"]}


def report_of(*checks, prints=True, **settings):
    """Returns a report of checks, whose arguments are given."""
    report = Report(prints=prints, **settings)
    for arguments in checks:
        report.add(Check(*arguments))
    return report


def test_the_file_lists_every_check_after_the_first_one(tmp_path):
    file = tmp_path / "new folder" / "preflight.json"
    report_of(("launcher", OK, "slurm"), file=file, thresholds={"warn_gbps": 1.0})
    content, statuses = read(file)
    assert statuses == {"launcher": OK, **dict.fromkeys(CHECK_NAMES[1:], SKIPPED)}
    assert content["thresholds"] == {"warn_gbps": 1.0} and not content["fit_to_train"]


@pytest.mark.parametrize(
    ("statuses", "code", "text"),
    [
        ((OK, OK), Exit.FINISHED, "verdict: fit to train"),
        ((OK, WARN), Exit.FINISHED, "verdict: fit to train; warnings: rendezvous"),
        ((WARN, FAIL), Exit.FAILED, "verdict: not fit to train: rendezvous; warnings: launcher"),
    ],
)
def test_the_verdict_names_failures_and_warnings_and_each_advice_once(tmp_path, capsys, statuses, code, text):
    named = zip(CHECK_NAMES, statuses, strict=False)
    checks = [(name, status, "summary", (), () if status == OK else ["do this"]) for name, status in named]
    assert report_of(*checks, file=tmp_path / "preflight.json").verdict() == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index(text) :] == [text, *["  - do this"] * (set(statuses) != {OK})]
    assert read(tmp_path / "preflight.json")[0]["fit_to_train"] is (code == Exit.FINISHED)


def test_a_skipped_check_names_the_failure_before_it_and_the_check_in_progress_follows_the_last_one(capsys):
    report_of(("gloo messages", FAIL, "no message arrived"), ("data", FAIL, "missing")).verdict()
    printed = capsys.readouterr().out
    assert "skipped  links            gloo messages failed" in printed
    assert "skipped  training steps   data failed" in printed and "skipped  launcher         not reached" in printed
    added = [], [("environment", OK, "")], [("environment", OK, ""), (CHECK_NAMES[-1], OK, "")]
    assert [report_of(*checks, prints=False).next_name for checks in added] == ["launcher", "GPUs", CHECK_NAMES[-1]]


def test_a_file_that_cannot_be_written_is_reported_once_and_other_ranks_write_nothing(tmp_path, capsys):
    for prints, file in ((True, tmp_path), (False, tmp_path / "preflight.json")):
        assert report_of(("launcher", OK, "slurm"), prints=prints, file=file).verdict() == Exit.FINISHED
        captured = capsys.readouterr()
        assert captured.err.count("could not be written") == prints and (captured.out != "") == prints
    assert not file.exists()


def test_a_quiet_report_prints_problems_and_the_verdict(monkeypatch, capsys):
    monkeypatch.setattr("rankzero.preflight.check.is_quiet", lambda: True)
    report = Report(prints=True)
    for name, status in zip(CHECK_NAMES, (OK, WARN), strict=False):
        report.notify("in progress")
        report.add(Check(name, status, f"summary of {name}"))
    report.verdict()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and CHECK_NAMES[1] in lines[0] and lines[1].startswith("verdict: ")
