import io
import json
import os
import subprocess
import time
from functools import partial
from unittest.mock import Mock

import pytest

from rankzero.commands.list import main
from rankzero.jobs.record import Record, State, write_record
from rankzero.runs.recorded_run import read_run
from recorded_runs import locked, write_curves, write_lock, write_run
from running import run, run_without_importing, script


@pytest.fixture
def listing(lines_of):
    return partial(lines_of, main)


def row_of(lines, name):
    return next(line for line in lines if line.startswith(f"{name} "))


def test_runs_are_listed_with_the_newest_last_and_their_metric_in_the_title(root, listing):
    write_run(root / "a-newer", age=180, attempts=2)
    write_run(root / "b-older", age=2 * 86400, metrics={"val/accuracy": 0.5, "val/loss": 1.0})
    write_run(root / "c-newest", "failed", age=5, epochs=1, samples_per_second=43_367.2)
    title, *rows = listing()
    assert title.split() == ["run", "status", "epochs", "steps", "val/accuracy", "samples/s", "age", "attempt"]
    assert [row.split() for row in rows] == [
        ["b-older", "finished", "3/3", "69", "0.5", "1500", "2", "d", "1"],
        ["a-newer", "finished", "3/3", "69", "0.9", "1500", "3", "min", "2"],
        ["c-newest", "failed", "1/3", "69", "0.9", "43.4k", rows[2].split()[6], "s", "1"],
    ]


def test_runs_with_different_metrics_name_the_metric_of_each(root, listing):
    write_run(root / "kept", age=3, config={"keep_best": "min:val/loss"})
    write_run(root / "accurate", age=2)
    write_run(root / "none", age=1, metrics={})
    lines = listing()
    assert "val/loss" in row_of(lines, "kept") and "0.3" in row_of(lines, "kept")
    assert "val/accuracy" in row_of(lines, "accurate")
    assert row_of(lines, "none").split()[4:6] == ["-", "-"]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_table_with_long_names_fits_the_terminal(root, listing, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for number in range(3):
        metrics = {"val/a_metric_with_a_very_long_name_accuracy": 0.123456789}
        sizes = {"steps": 123_456_789, "epochs": 1000, "max_epochs": 1000, "samples_per_second": 1_234_567.8}
        write_run(root / f"a-model-on-a-data-set-with-many-settings-{number}", age=1e6, metrics=metrics, **sizes)
    write_run(root / "other")
    lines = listing()
    assert max(map(len, lines)) <= width
    assert all(line.split()[0].endswith(f"-{number}") for number, line in enumerate(lines[1:4]))


def test_a_run_whose_owner_is_alive_is_running_with_the_values_it_has_logged(root, listing):
    path = write_run(root / "live", None, config={"trainer": {"max_epochs": 20}})
    steps = range(0, 500, 10)
    curves = {"train/loss": {step: 1 / (step + 1) for step in steps}, "val/accuracy": {399: 0.75}}
    write_curves(path, curves | {"train/samples_per_second": dict.fromkeys(steps, 2000.0)})
    write_lock(write_run(root / "resumed", "stopped"))  # an earlier attempt stopped
    with locked(path):
        lines = listing()
    assert row_of(lines, "live").split()[1:6] == ["running", "4/20", "491", "0.75", "2000"]
    assert "running" in row_of(lines, "resumed")


def test_an_attempt_without_a_summary_has_the_status_of_its_process_or_of_its_heartbeat(root, listing):
    process = subprocess.Popen(["true"])
    process.wait()
    write_lock(write_run(root / "lost", None), pid=process.pid, born="1")
    later = write_run(root / "lost-later", "stopped", attempts=2)
    write_lock(later, pid=process.pid, born="1")
    (later / "summary.json").write_text((later / "summary.json").read_text().replace('"attempts": 2', '"attempts": 1'))
    write_lock(write_run(root / "near", None), host="elsewhere", boot="another kernel")
    silent = write_lock(write_run(root / "far", None), host="elsewhere", boot="another kernel", pid=77)
    os.utime(silent, (time.time() - 7200, time.time() - 7200))
    write_run(root / "unclear", None, attempts=2)
    lines = listing()
    expected = {"lost": "killed", "lost-later": "killed", "near": "running", "far": "unknown", "unclear": "unknown"}
    assert {name: row_of(lines, name).split()[1] for name in expected} == expected
    assert any(line.startswith("lost: ") and "has ended without a summary" in line for line in lines)
    assert "far: no heartbeat of process 77 on elsewhere for 2 h: killed, suspended, or the clocks differ" in lines
    assert "unclear: attempt 2 on node1 has neither a lock nor a summary" in lines


@pytest.mark.parametrize("content", [b"{", b"[1, 2]", b"\xff\xfe"], ids=["cut off", "list", "bytes"])
def test_damaged_files_are_named_and_hide_no_other_run(root, listing, content):
    for number, file in enumerate(("run.json", "summary.json")):
        (write_run(root / f"damaged-{number}") / file).write_bytes(content)
    write_run(root / "intact")
    lines = listing()
    assert "finished" in row_of(lines, "intact")
    assert row_of(lines, "damaged-0") and "unknown" in row_of(lines, "damaged-1")


def test_hostile_names_print_no_control_characters_and_no_markup(root, listing):
    for name in ("[red]markup", "esc\x1b[31mape", "new\nline", "tab\there", f"wide{'-漢字' * 9}"):
        write_run(root / name, None)
    (root / os.fsdecode(b"bytes-\xff")).mkdir()
    (root / os.fsdecode(b"bytes-\xff") / "run.json").write_text("{}")
    text = "\n".join(listing())
    assert text.replace("\n", "").isprintable()
    assert "[red]markup" in text and "esc?[31mape" in text and "new?line" in text and "bytes-?" in text
    assert json.loads("\n".join(listing("--json")))


def test_archived_runs_and_older_runs_are_counted_and_listed_with_all(root, listing):
    for number in range(5):
        write_run(root / f"r{number}", age=100 - number)
    write_run(root / "r0.before-1", age=1000)
    assert [line.split()[0] for line in listing("--last", "2")[1:3]] == ["r3", "r4"]
    assert "1 older and 1 archived runs" in listing("--last", "4")[-1]
    assert listing("--last", "2")[-1] == "runs: 3 older and 1 archived runs are not listed; --all lists them"
    (root / "r0.before-1").rename(root.parent / "elsewhere")
    assert listing("--last", "4")[-1] == "runs: 1 older run is not listed; --all lists it"
    (root.parent / "elsewhere").rename(root / "r0.before-1")
    assert [line.split()[0] for line in listing("--all")[1:]] == ["r0.before-1", "r0", "r1", "r2", "r3", "r4"]


def test_runs_are_selected_by_name_and_status_and_sorted_by_a_metric(root, listing):
    for number, (status, loss) in enumerate((("finished", 0.2), ("failed", 0.3), ("finished", 0.1))):
        write_run(root / f"sweep-{number}", status, age=9 - number, metrics={"loss": loss})
    write_run(root / "other", "failed", metrics={"val/accuracy": 1.0, "loss": None})

    def names(*arguments):
        return [line.split()[0] for line in listing(*arguments)[1:] if line and ":" not in line]

    assert names("--name", "sweep-*") == ["sweep-0", "sweep-1", "sweep-2"]
    assert names("--status", "failed") == ["sweep-1", "other"]
    assert names("--sort", "loss") == ["sweep-2", "sweep-0", "sweep-1"] == names("--sort", "max:loss")
    assert names("--sort", "min:loss", "--status", "finished") == ["sweep-0", "sweep-2"]
    lines = listing("--sort", "min:loss", "--last", "1")
    assert lines[1].startswith("sweep-2") and lines[-1] == "runs: 2 other runs are not listed; --all lists them"
    assert listing("--name", "nothing") == ["runs contains no such runs"]
    refusal = ["  found  the runs have only loss, val/accuracy", "  type   --sort loss"]
    assert listing("--sort", "los", code=2)[2:] == refusal


@pytest.fixture
def job_states(monkeypatch):
    """Replaces the scheduler by a dictionary of states; a job without an entry must not be asked about."""
    states = {}

    def states_of(records):
        return {record.name: states[record.name] for record in records}

    monkeypatch.setattr("rankzero.commands.list.states_of", states_of)
    return states


@pytest.fixture
def answer(monkeypatch):
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_listed_runs_are_deleted_with_the_files_of_their_jobs_after_a_question(root, listing, answer):
    for name, status in (("sweep-1", "finished"), ("sweep-2", "failed"), ("sweep-21", "failed"), ("other", "failed")):
        write_run(root / name, status)
    write_record(root, Record("sweep-2", "slurm", None, "7"))
    (root / "sweep-2.job.sh").touch()
    (root / "sweep-2.job.log").touch()
    (root / "sweep-2" / "checkpoints").mkdir()
    (root / "sweep-2" / "checkpoints" / "state.pt").write_bytes(bytes(200_000_000))
    for text in ("no\n", "", "2\n"):
        answer(text)
        lines = listing("--name", "sweep-?", "--delete")
        assert lines[-1] == "delete 2 runs, 0.2 GB? yes or no: nothing was deleted"
    answer("yes\n")
    assert listing("--name", "sweep-?", "--delete")[-1] == "delete 2 runs, 0.2 GB? yes or no: 2 deleted"
    assert sorted(path.name for path in root.iterdir()) == ["other", "sweep-21"]
    assert listing("--status", "finished", "--delete") == ["runs contains no such runs"]


def test_a_run_that_is_training_waiting_or_cannot_be_deleted_stays(root, listing, answer, job_states, capsys):
    for name in ("live", "waits", "stopped"):
        write_run(root / name, "stopped")
    write_record(root, Record("waits", "slurm", None, "7"))
    job_states["waits"] = State("PENDING", True)
    elsewhere = write_run(root.parent / "elsewhere" / "linked", "stopped")
    (root / "linked").symlink_to(elsewhere)
    with locked(root / "live"):
        answer("y\n")
        assert main(["--delete"]) == 1
    output = capsys.readouterr()
    assert "delete 2 runs, 0.0 GB; 2 that run or wait stay? yes or no: 1 deleted" in output.out
    assert f"run linked was not deleted: it is a link to {elsewhere}" in output.err
    assert sorted(path.name for path in root.glob("[a-z]*")) == ["linked", "live", "waits", "waits.job.json"]
    assert elsewhere.exists()
    refusal = ["  found  --delete asks a question, and JSON is for scripts", "  type   --delete"]
    assert listing("--delete", "--json", code=2)[2:] == refusal


def test_hundreds_of_runs_are_read_only_as_far_as_they_are_shown(root, listing, monkeypatch):
    for number in range(300):
        (root / f"r{number}").mkdir(parents=True)
        (root / f"r{number}" / "run.json").touch()
    read = Mock(side_effect=read_run)
    monkeypatch.setattr("rankzero.commands.list.read_run", read)
    assert "250 older runs are not listed" in listing()[-1] and read.call_count == 50


def test_an_empty_root_has_a_line_and_a_missing_root_is_refused_with_the_flag_to_type(root, listing):
    lines = listing(code=2)
    assert "asked  --root runs" in lines[1] and "there is no folder" in lines[2] and "--root DIR" in lines[3]
    root.mkdir()
    (root / "not-a-run").mkdir()
    (root / "file").touch()
    assert listing() == ["runs contains no runs"]
    assert listing("--json") == ["[]"]
    assert listing("runs", code=2)[-1] == "  type   python launch/list.py --root runs"
    assert "cannot be read: Not a directory" in "\n".join(listing("--root", "runs/file", code=2))


def test_folders_without_permission_and_unreadable_runs_are_listed_as_unknown(root, listing, without_permission):
    write_run(root / "closed")
    listing()  # imports everything, which an unprivileged user may be unable to do
    with without_permission(root / "closed"):
        assert "unknown" in row_of(listing(), "closed")
    (root / "broken/run.json").mkdir(parents=True)
    lines = listing()
    assert "unknown" in row_of(lines, "broken") and lines[-1].startswith("broken: run.json cannot be read: ")


def test_json_contains_all_metrics_and_null_for_nan(root, listing):
    write_run(root / "diverged", metrics={"val/loss": None, "val/accuracy": 0.1}, age=60)
    (entry,) = json.loads("\n".join(listing("--json")))
    assert entry["metrics"] == {"val/loss": None, "val/accuracy": 0.1}
    assert entry["metric"] == {"name": "val/accuracy", "value": 0.1}
    assert (entry["name"], entry["status"], entry["attempts"]) == ("diverged", "finished", 1)


def test_a_submitted_run_has_the_status_of_its_job_until_it_begins_and_a_finished_its_own(root, listing, job_states):
    write_run(root / "done")
    write_run(root / "sweep-0")
    for name, array in (("new", None), ("done", None), ("sweep", "0-3")):
        write_record(root, Record(name, "slurm", "srun", "12", array))
    os.utime(root / "done.job.json", (time.time() - 60,) * 2)
    job_states |= {"new": State("PENDING", True, "(Priority)"), "sweep": State("2 PENDING", True)}
    lines = listing()
    expected = {"new": "waiting", "done": "finished", "sweep": "waiting", "sweep-0": "finished"}
    assert {name: row_of(lines, name).split()[1] for name in expected} == expected
    assert "new: job 12 (slurm) is PENDING (Priority)" in lines


def test_a_resubmitted_run_waits_in_the_queue_until_its_attempt_begins(root, listing, job_states):
    write_run(root / "again", "stopped", another_attempt=True)
    write_record(root, Record("again", "slurm", "srun", "12"))
    states = {"waiting": State("PENDING", True), "running": State("RUNNING", True), "stopped": State("ENDED", False)}
    for status, job_states["again"] in states.items():
        assert row_of(listing(), "again").split()[1] == status


def test_the_script_lists_runs_without_importing_torch(tmp_path):
    write_run(tmp_path / "runs/first")
    code = "from rankzero.commands.list import main; assert main([]) == 0"
    assert "first" in run_without_importing("torch", "lightning", "matplotlib", "numpy", code=code, folder=tmp_path).out
    assert "--root DIR" in run("python", script("list"), "--help", folder=tmp_path).out
