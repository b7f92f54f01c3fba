from rankzero.distributed.scheduler.pbs_config import pbs_setting


def test_a_setting_is_read_from_the_file_that_a_variable_names_if_it_is_valid(tmp_path, monkeypatch):
    file = tmp_path / "pbs.conf"
    monkeypatch.setenv("PBS_CONF_FILE", str(file))
    assert pbs_setting("PBS_EXEC") is None
    for content in (b"\xff\xfe", b"", b"no setting"):
        file.write_bytes(content)
        assert pbs_setting("PBS_EXEC") is None
    file.write_text("PBS_SERVER=pbs1\nPBS_EXEC=/opt/pbs\n  PBS_HOME=/var/spool/pbs  \nPBS_START_MOM=\n")
    assert [pbs_setting(name) for name in ("PBS_EXEC", "PBS_HOME")] == ["/opt/pbs", "/var/spool/pbs"]
    assert pbs_setting("PBS_START_MOM") is None and pbs_setting("PBS_LEAF_NAME") is None
