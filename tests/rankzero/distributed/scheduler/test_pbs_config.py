import pytest

from rankzero.distributed.scheduler.pbs_config import pbs_setting


def test_a_setting_is_read_from_the_file_that_a_variable_names(tmp_path, monkeypatch):
    (tmp_path / "pbs.conf").write_text(
        "PBS_SERVER=pbs1\nPBS_EXEC=/opt/pbs\n  PBS_HOME=/var/spool/pbs  \nPBS_START_MOM=\n"
    )
    monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "pbs.conf"))
    assert [pbs_setting(name) for name in ("PBS_EXEC", "PBS_HOME")] == ["/opt/pbs", "/var/spool/pbs"]
    assert pbs_setting("PBS_START_MOM") is None and pbs_setting("PBS_LEAF_NAME") is None


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"", b"no setting"])
def test_without_a_valid_file_there_is_no_setting(tmp_path, monkeypatch, content):
    if content is not None:
        (tmp_path / "pbs.conf").write_bytes(content)
    monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "pbs.conf"))
    assert pbs_setting("PBS_EXEC") is None
