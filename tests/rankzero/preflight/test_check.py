import json
import socket
import time

import pytest

from rankzero.distributed.monitoring.hangs import describe_ranks, differences
from rankzero.messages import AnotherRankFailed, Exit
from rankzero.preflight.check import CHECK_NAMES, FAIL, OK, SKIPPED, WARN, Check, Report, error_lines, gather


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


HOSTS = ("n1", "n1", "n2", "n2")


def test_differences_and_errors_name_the_ranks_and_hosts_of_each_value_most_frequent_first():
    assert differences([1, 1, 1, 1], HOSTS) == []
    assert differences(["2.15", "2.15", "2.15", "2.14"], HOSTS) == ["2.15 on ranks 0-2 (n1, n2)", "2.14 on rank 3 (n2)"]
    texts = differences(range(20), ["n1"] * 20)
    assert len(texts) == 9 and texts[-1] == "and 12 other values"
    assert describe_ranks(range(6), [f"n{rank}" for rank in range(6)]) == "ranks 0-5 (n0, n1, n2 and 3 more hosts)"
    errors = {0: "OSError: full\ntraceback", 1: "OSError: full", 3: "ValueError: x"}
    assert error_lines(errors, HOSTS) == ["ranks 0-1 (n1): OSError: full", "rank 3 (n2): ValueError: x"]
    assert error_lines({rank: str(rank) for rank in range(20)}, ["n1"] * 20)[8:] == ["and 12 other errors"]


def gather_with_failures(coordinator, ended):
    """Gathers while rank 1 exits, is interrupted, and does not respond; returns the results of this rank."""
    rank, results = coordinator.world.rank, []

    def work(error):
        if rank == 1:
            raise error
        return "value"

    results.append(gather(coordinator, lambda: work(SystemExit(0))))
    try:
        results.append(gather(coordinator, lambda: work(KeyboardInterrupt())))
    except KeyboardInterrupt:
        results.append("interrupted")
    if rank == 1:
        while not ended.exists():
            time.sleep(0.01)
        return results
    try:
        gather(coordinator, lambda: None, seconds=0.5)
    except AnotherRankFailed as error:
        results.append(str(error))
    ended.touch()
    return results


def test_a_rank_that_exits_is_interrupted_or_does_not_respond_keeps_no_other_rank_waiting(on_ranks, tmp_path):
    exited, values = (["value", None], {1: "SystemExit: 0"}), ["value", None]
    late = f"rank 1 on {socket.gethostname()} was still starting after 0.5 s; to wait longer, add --start_timeout 4"
    first, second = on_ranks(gather_with_failures, 2, tmp_path / "ended")
    assert first == [exited, (values, {1: "KeyboardInterrupt"}), late] and second == [exited, "interrupted"]
