import pytest


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Puts programs on a PATH that has no scheduler's but those: name=shell script, recorded answers mostly."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(**scripts):
        for name, script in scripts.items():
            file = folder / name
            file.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
            file.chmod(0o755)

    return add
