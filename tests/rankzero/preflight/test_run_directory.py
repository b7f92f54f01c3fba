import shutil

import pytest

from rankzero.preflight import run_directory
from rankzero.preflight.check import FAIL, OK, WARN
from rankzero.preflight.run_directory import check_run_directory


def run_checks(coordinator, cases):
    """Checks the folder and the size of a checkpoint of each case, and a folder that rank 1 may not read."""
    checks = [check_run_directory(coordinator, *case, keep=3) for case in cases]

    def fail(is_visible, folder):
        raise PermissionError("denied")

    with pytest.MonkeyPatch.context() as patch:
        if coordinator.world.rank == 1:
            patch.setattr(run_directory, "wait_until_visible", fail)
        return [*checks, check_run_directory(coordinator, *cases[0], keep=3)]


def test_folders_are_checked_for_space_and_permission_and_no_file_or_new_folder_remains(on_ranks, tmp_path):
    free = shutil.disk_usage(tmp_path).free
    (tmp_path / "file").write_text("")
    cases = (tmp_path / "new/runs", 1000), (tmp_path, 4 * free), (tmp_path, free // 2), (tmp_path / "file", 1000)
    for shared, *full, unwritable, unreadable in on_ranks(run_checks, 2, cases):
        assert shared.status == OK and "shared, writable, " in shared.summary
        assert shared.values["needed_bytes"] == 4000 and len(shared.values["ranks"]) == 2
        assert [check.status for check in full] == [FAIL, WARN]  # not even one checkpoint, and not all
        for check in full:
            assert "are free, and 4 checkpoints need " in check.details[0]
            assert check.advice == ["delete files, --keep N with a smaller N, or --root DIR on another disk"]
        assert unwritable.status == FAIL and "cannot write in " in unwritable.summary
        assert "--root DIR" in unwritable.advice[0]
        (line,) = unreadable.details  # not as another folder
        assert unreadable.status == FAIL and line.endswith("PermissionError: denied") and line.startswith("rank 1 (")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
