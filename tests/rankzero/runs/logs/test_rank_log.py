import faulthandler
import shutil

import pytest

from rankzero.runs.directory import RunDirectory
from rankzero.runs.logs.rank_log import RankLog


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "x")
    run.begin_attempt("model: {}\n")
    return run


@pytest.fixture
def opened(run, monkeypatch):
    """Returns a function that opens the log of a rank, which is closed after the test."""
    opened, destinations = [], []
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: False)
    monkeypatch.setattr(faulthandler, "enable", lambda log: destinations.append(log.name))
    monkeypatch.setattr(faulthandler, "disable", lambda: destinations.append(None))

    def open_log(rank=0):
        opened.append(RankLog(run, rank))
        opened[-1].open()
        return opened[-1].logger, destinations

    yield open_log
    for log in opened:
        log.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_deleted_log_is_created_again_with_one_warning_on_rank_zero(run, opened, rank, capsys):
    logger, destinations = opened(rank)
    for number in range(3):
        logger.info("before %d", number)
        shutil.rmtree(run.log(rank).parent)
        logger.info("after %d", number)
    lines = run.log(rank).read_text().splitlines()
    assert len(lines) == 2 and "attempt 1: this log was deleted" in lines[0] and "INFO after 2" in lines[1]
    err = capsys.readouterr().err
    assert err.count("\n") == (rank == 0) and (str(run.path / "logs") in err) == (rank == 0)
    assert destinations == [str(run.log(rank))] + [None, str(run.log(rank))] * 3


def test_a_run_that_was_removed_is_not_created_again_and_any_text_can_be_logged_in_any_locale(run, opened, monkeypatch):
    monkeypatch.setattr("locale.getpreferredencoding", lambda *arguments: "ascii")
    logger, _ = opened()
    shutil.rmtree(run.path)
    logger.info("after")
    assert not run.path.exists()
    run.path.mkdir()
    logger.info("größe 漢 \udcff")
    assert run.log(0).read_text(encoding="utf-8").endswith("INFO größe 漢 \\udcff\n")


def test_the_log_of_an_archived_run_stays_in_the_archive(run, opened, tmp_path):
    logger, _ = opened()
    run.archive()
    RunDirectory(run.path).begin_attempt("model: {}\n")
    logger.info("of the earlier run")
    (archived,) = tmp_path.glob("x.before-1/logs/rank-000.log")
    assert "of the earlier run" in archived.read_text() and not run.log(0).exists()
