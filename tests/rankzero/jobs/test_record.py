import json

from rankzero.jobs.record import Record, array_indices, logs_of, read_record, record_path, recorded_jobs, write_record
from running import refusal_of

RECORD = Record("x", "pbs", "pbsdsh", "15[].pbs1", "0-3", "login1", "")


def test_a_written_record_is_read_back(tmp_path):
    assert read_record(tmp_path, "x") is None and read_record(tmp_path / "missing", "x") is None
    for record in (Record("x", "local", None, "42", host="h", started="12345"), RECORD):
        write_record(tmp_path, record)
        assert read_record(tmp_path, "x") == record
    assert [path.name for path in tmp_path.iterdir()] == ["x.job.json"]
    fields = {"name": "x", "scheduler": "pbs", "form": "pbsdsh", "id": "15[].pbs1", "array": "0-3", "host": "login1"}
    assert json.loads((tmp_path / "x.job.json").read_text()) == fields | {"started": ""}


def test_the_id_of_the_next_job_replaces_the_recorded_one_until_a_record_is_written(tmp_path):
    write_record(tmp_path, RECORD)
    (tmp_path / ".y.job.next").write_text("17.pbs1\n")
    for content in (b"", b"\xff"):  # qsub has not answered yet, or has failed
        (tmp_path / ".x.job.next").write_bytes(content)
        assert read_record(tmp_path, "x") == RECORD
    (tmp_path / ".x.job.next").write_text("16.pbs1\n")
    assert read_record(tmp_path, "x").id == "16.pbs1"
    write_record(tmp_path, RECORD)
    assert read_record(tmp_path, "x") == RECORD and not (tmp_path / ".x.job.next").exists()


def test_a_damaged_or_unreadable_record_is_refused_with_the_file_to_remove_and_left_out_of_a_list(tmp_path):
    write_record(tmp_path, RECORD)
    path = record_path(tmp_path, "b")
    for content in (b"{", b"[]", b'{"name": "b"}'):
        path.write_bytes(content)
        error = refusal_of(read_record, tmp_path, "b")
        assert error.asked == "the job of run b" and error.instead == f"rm {path}"
        assert error.found.startswith(f"{path} is not a record of a job: ")
    record_path(tmp_path, "c").mkdir()
    error = refusal_of(read_record, tmp_path, "c")
    assert "cannot read" in error.found and "Is a directory" in error.found and error.instead == "--root DIR"
    assert recorded_jobs(tmp_path) == {"x": RECORD}


def test_the_log_of_a_job_is_one_file_or_one_file_per_member(tmp_path):
    assert logs_of(tmp_path, "x", False) == logs_of(tmp_path, "x", True) == []
    names = "x.job.log x.job-0.log x.job-1.log x-2.job.log xx.job-0.log x.job.log.15.pbs1 x.job-1.sh"
    for name in names.split():
        (tmp_path / name).touch()
    assert logs_of(tmp_path, "x", False) == [tmp_path / "x.job.log.15.pbs1", tmp_path / "x.job.log"]
    assert logs_of(tmp_path, "x", True) == [tmp_path / "x.job-0.log", tmp_path / "x.job-1.log"]


def test_an_array_is_expanded_to_its_indices():
    expected = {"3": [3], "0-3": [0, 1, 2, 3], "1,5-9:2%2": [1, 5, 7, 9], "0-5:2": [0, 2, 4]}
    assert {array: array_indices(array) for array in expected} == expected
