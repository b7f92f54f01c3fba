import pytest

from rankzero.runs.checkpoints.retention import Retention
from rankzero.runs.checkpoints.write import write_directory


@pytest.fixture
def folder(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, None), (6, 2.5)):
        metrics = {"val/loss": loss, "val/accuracy": step / 10}
        write_directory({"global_step": step, "rankzero": {"metrics": metrics}}, tmp_path / f"step-{step:08d}")
    return tmp_path


def steps(paths):
    return [int(path.name.removeprefix("step-")) for path in paths]


def test_the_newest_checkpoints_are_kept(folder):
    assert steps(Retention(keep=2).surplus(folder)) == [1, 2, 3, 4]
    assert Retention(keep=6).surplus(folder) == Retention(keep=9).surplus(folder) == []
    for newest_or_unknown in ("max:val/accuracy", "min:other"):
        assert steps(Retention(keep=1, best=newest_or_unknown).surplus(folder)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("best", "kept_step"), [("min:val/loss", 2), ("max:val/loss", 1), ("min:val/accuracy", 1)])
def test_the_best_checkpoint_with_a_valid_manifest_is_kept_too(folder, best, kept_step):
    retention = Retention(keep=1, best=best)
    assert steps([retention.best_in(folder)]) == [kept_step]
    assert steps(retention.surplus(folder)) == [step for step in range(1, 6) if step != kept_step]
    (folder / f"step-{kept_step:08d}/manifest.json").write_text("{}")
    assert steps([retention.best_in(folder)]) == [{"min:val/loss": 3, "max:val/loss": 6, "min:val/accuracy": 2}[best]]
