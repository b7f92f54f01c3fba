import pytest

from rankzero.runs.checkpoints.atomic_files import write_text


def test_a_disk_that_refuses_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_text(path, "old")

    def refuse(descriptor):
        assert path.read_text() == "old"  # what is written is not there before it is on the disk
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr("os.fsync", refuse)
        write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
