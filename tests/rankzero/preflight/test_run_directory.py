import shutil

import pytest

from rankzero.distributed.timers import TIMERS
from rankzero.preflight import run_directory
from rankzero.preflight.check import FAIL, OK, WARN
from rankzero.preflight.run_directory import check_run_directory


def run_check(coordinator, folder, checkpoint_bytes):
    return check_run_directory(coordinator, folder, checkpoint_bytes, keep=3)


def test_a_shared_writable_folder_with_space_is_ok_and_no_file_or_new_folder_remains(on_ranks, tmp_path):
    for check in on_ranks(run_check, 2, tmp_path / "new/runs", 1000):
        assert check.status == OK and "shared, writable, " in check.summary
        assert check.values["needed_bytes"] == 4000 and len(check.values["ranks"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("needed", "status"), [(4.0, FAIL), (0.5, WARN)])
def test_too_little_space_fails_for_one_checkpoint_and_warns_for_all(on_ranks, tmp_path, needed, status):
    checkpoint_bytes = int(needed * shutil.disk_usage(tmp_path).free)
    for check in on_ranks(run_check, 2, tmp_path, checkpoint_bytes):
        assert check.status == status and "are free, and 4 checkpoints need " in check.details[0]
        assert check.advice == ["delete files, --keep N with a smaller N, or --root DIR on another disk"]


def test_a_root_that_is_a_file_fails_with_advice(on_ranks, tmp_path):
    (tmp_path / "runs").write_text("")
    for check in on_ranks(run_check, 2, tmp_path / "runs", 1000):
        assert check.status == FAIL and "cannot write in " in check.summary and "--root DIR" in check.advice[0]


def run_separate(coordinator, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TIMERS, "shared_file", 0.2)
        return check_run_directory(coordinator, folder / str(coordinator.launch.rank), 1000, keep=3)


def test_different_folders_on_two_ranks_are_named(on_ranks, tmp_path):
    for check in on_ranks(run_separate, 2, tmp_path):
        assert (
            check.status == FAIL
            and "on rank 1 (" in check.details[0]
            and "is not the same folder as on rank 0" in check.details[0]
        )
        assert len(check.details) == 1


def run_unreadable(coordinator, folder):
    def fail(is_visible, folder):
        raise PermissionError("denied")

    with pytest.MonkeyPatch.context() as patch:
        if coordinator.launch.rank == 1:
            patch.setattr(run_directory, "wait_until_visible", fail)
        return check_run_directory(coordinator, folder, 1000, keep=3)


def test_a_folder_that_a_rank_may_not_read_is_not_another_folder(on_ranks, tmp_path):
    for check in on_ranks(run_unreadable, 2, tmp_path):
        (line,) = check.details
        assert check.status == FAIL and line.endswith("PermissionError: denied") and line.startswith("rank 1 (")
