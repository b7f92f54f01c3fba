import pytest


@pytest.fixture
def write_process_files(tmp_path):
    """Returns a function that writes a process's cgroup files, and the /proc files that locate them."""

    def write(mount, membership, files):
        for path, text in files.items():
            (tmp_path / "mount" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "mount" / path).write_text(text)
        (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{membership}\n")
        (tmp_path / "mountinfo").write_text(mount.format(mount=tmp_path / "mount") + "\n")
        return tmp_path

    return write
