import pytest

from rankzero.runs.checkpoints.atomic_files import write_text


def test_a_write_error_keeps_the_old_file_and_leaves_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_text(path, "old")

    def refuse(descriptor):
        assert path.read_text() == "old"  # the new content is not visible before it is on the disk
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr("os.fsync", refuse)
        write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
