from pathlib import Path

import pytest

from rankzero.distributed.process.config_folder import config_folder


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CONFIG_HOME": "/settings", "HOME": "/home/a"}, "/settings/rankzero"),
        ({"XDG_CONFIG_HOME": "/settings/"}, "/settings/rankzero"),
        ({"HOME": "/home/a"}, "/home/a/.config/rankzero"),
        ({"XDG_CONFIG_HOME": "", "HOME": "/home/a"}, "/home/a/.config/rankzero"),
        ({"XDG_CONFIG_HOME": "relative", "HOME": "/home/a"}, "/home/a/.config/rankzero"),
        ({"XDG_CONFIG_HOME": "~/settings", "HOME": "/home/a"}, "/home/a/.config/rankzero"),
        ({"HOME": "/"}, "/.config/rankzero"),
        ({"HOME": "relative"}, None),
        ({"HOME": ""}, None),
        ({"XDG_CONFIG_HOME": "relative"}, None),
        ({}, None),
    ],
)
def test_the_first_absolute_path_is_used(variables, folder, monkeypatch):
    for name in ("XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert config_folder() == (Path(folder) if folder else None)


def test_the_folder_is_not_created(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_folder() == tmp_path / "rankzero" and not (tmp_path / "rankzero").exists()
