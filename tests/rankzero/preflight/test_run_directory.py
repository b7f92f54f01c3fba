import pytest

from rankzero.preflight import run_directory
from rankzero.preflight.check import FAIL, OK
from rankzero.preflight.run_directory import check_run_directory


def run_check(coordinator, folder, checkpoint_bytes):
    return check_run_directory(coordinator, folder, checkpoint_bytes, keep=3)


def test_a_shared_writable_folder_with_space_is_ok_and_no_file_or_new_folder_remains(on_ranks, tmp_path):
    for check in on_ranks(run_check, 2, tmp_path / "new/runs", 1000):
        assert check.status == OK and "shared, writable, " in check.summary
        assert check.values["needed_bytes"] == 4000 and len(check.values["ranks"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_for_the_checkpoints_fails(on_ranks, tmp_path):
    for check in on_ranks(run_check, 2, tmp_path, 10**15):
        assert check.status == FAIL and "4 checkpoints need 4,000,000.0 GB" in check.details[0]


def test_a_root_that_is_a_file_fails_with_advice(on_ranks, tmp_path):
    (tmp_path / "runs").write_text("")
    for check in on_ranks(run_check, 2, tmp_path / "runs", 1000):
        assert check.status == FAIL and "cannot write in " in check.summary and "--root DIR" in check.advice[0]


def run_separate(coordinator, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory, "SHARED_SECONDS", 0.2)
        return check_run_directory(coordinator, folder / str(coordinator.launch.rank), 1000, keep=3)


def test_different_folders_on_two_ranks_are_named(on_ranks, tmp_path):
    for check in on_ranks(run_separate, 2, tmp_path):
        assert (
            check.status == FAIL
            and "on rank 1 (" in check.details[0]
            and "is not the same folder as on rank 0" in check.details[0]
        )
        assert len(check.details) == 1
