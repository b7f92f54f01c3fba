from pathlib import Path

import pytest

from rankzero.distributed.process.config_folder import config_folder

IN_HOME = "/home/a/.config/rankzero"


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CONFIG_HOME": "/settings", "HOME": "/home/a"}, "/settings/rankzero"),
        ({"XDG_CONFIG_HOME": "/settings/"}, "/settings/rankzero"),
        ({"HOME": "/home/a"}, IN_HOME),
        *(({"XDG_CONFIG_HOME": path, "HOME": "/home/a"}, IN_HOME) for path in ("", "relative", "~/settings")),
        ({"HOME": "/"}, "/.config/rankzero"),
        *((variables, None) for variables in ({}, {"HOME": "relative"}, {"HOME": ""}, {"XDG_CONFIG_HOME": "relative"})),
    ],
)
def test_the_first_absolute_path_is_used(variables, folder, monkeypatch):
    for name in ("XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert config_folder() == (Path(folder) if folder else None)
    assert not Path("/settings").exists()
