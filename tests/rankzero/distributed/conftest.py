import pytest


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Replaces PATH by an empty folder, and returns a function that adds shell scripts to it.

    The function takes name=script arguments. Most scripts print recorded answers of a scheduler.
    """
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(**scripts):
        for name, script in scripts.items():
            file = folder / name
            file.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
            file.chmod(0o755)

    return add
