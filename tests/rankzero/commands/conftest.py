import pytest

from running import write_program


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Replaces PATH by an empty folder, and returns a function that adds shell scripts to it.

    The function takes name=script arguments. Each script appends its arguments to the file `programs/NAME.calls`.
    """
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PBS_CONF_FILE", str(folder / "pbs.conf"))  # this machine may have a PBS

    def add(**scripts):
        for name, script in scripts.items():
            file = folder / name
            write_program(file, f'PATH=/usr/bin:/bin\necho "$*" >>{file}.calls\n{script}')

    return add


@pytest.fixture
def calls(tmp_path):
    """Returns a function that returns the command lines with which a stand-in program was called."""

    def read(name):
        file = tmp_path / "programs" / f"{name}.calls"
        return file.read_text().splitlines() if file.exists() else []

    return read
