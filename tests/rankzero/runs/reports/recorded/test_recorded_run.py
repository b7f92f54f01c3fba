import os

from rankzero.runs.reports.recorded.recorded_run import is_run, read_run
from recorded_runs import write_run


def test_the_fields_of_a_run_come_from_its_files(tmp_path):
    path = write_run(tmp_path / "a", "stopped", attempts=3, another_attempt=True, age=100)
    run = read_run(path)
    assert (run.status, run.attempts, run.steps, run.host, len(run.starts)) == ("stopped", 3, 69, "node1", 3)
    assert run.has_newest_summary and run.awaits_attempt and not run.is_archived and run.problem == ""
    text = (path / "run.json").read_text()
    (path / "run.json").write_text(text.replace('"attempts": [', '"attempts": [{"number": 0}, '))
    assert not read_run(path).has_newest_summary  # the summary is that of an earlier attempt


def test_the_metric_of_keep_best_is_read_from_both_kinds_of_configuration(tmp_path):
    run = write_run(tmp_path / "a")
    for text, expected in {
        "keep_best: min:val/loss\n": ("min", "val/loss"),
        "trainer:\n  keep_best: 'max:val_acc'\n": ("max", "val_acc"),
        "keep_best: null\n": None,
        "other_keep_best: min:a\n": None,
        "": None,
    }.items():
        (run / "config.yaml").write_text(text)
        assert read_run(run).kept_best == expected, text


def test_only_directories_with_a_record_are_runs_and_a_pipe_in_place_of_a_file_is_not_read(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert not any(is_run(tmp_path / name) for name in ("file", "folder", "missing", "file/inside", "nul\0", "n" * 300))
    run = write_run(tmp_path / "a")
    assert is_run(run)
    names = ["a.before-1", "a.before-12", "a.before-x", "a.before-1b", ".before-1"]
    assert [read_run(tmp_path / name).is_archived for name in names] == [True, True, False, False, False]
    for name in ("run.json", "summary.json", "config.yaml"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert read_run(run).problem == "run.json cannot be read: not a file; summary.json cannot be read: not a file"
