import json

import pytest

from project.errors import CannotStart
from running import evaluate_here, fit_here


@pytest.fixture
def run(here):
    fit_here("--model", "MLP", "--data", "Digits", "--epochs", "2", "--run", "x")
    return here / "runs" / "x"


def result(path):
    return json.loads(path.read_text())


def test_the_validation_split_is_what_training_saw(run, capsys):
    assert evaluate_here("--run", "x") == 0
    seen = json.loads((run / "summary.json").read_text())["metrics"]
    found = result(run / "evaluate-val.json")
    assert found["metrics"] == {name: value for name, value in seen.items() if name.startswith("val/")}
    assert (found["run"], found["split"], found["samples"]) == ("x", "val", 180)
    assert "180, each once" in capsys.readouterr().out


def test_the_test_split(run):
    evaluate_here("--run", "x", "--split", "test", "--output", "deep/in/here.json")
    assert set(result(run.parent.parent / "deep/in/here.json")["metrics"]) == {"test/accuracy", "test/loss"}


@pytest.mark.parametrize("size", ["1", "7", "180", "1000"])
def test_the_batch_size_changes_nothing(run, size):
    evaluate_here("--run", "x", "--output", "a.json")
    evaluate_here("--run", "x", "--output", "b.json", "--batch_size", size)
    a, b = (result(run.parent.parent / name)["metrics"] for name in ("a.json", "b.json"))
    assert a == pytest.approx(b, abs=1e-6)


def test_an_older_checkpoint_and_the_newest_run(run):
    evaluate_here("--checkpoint", str(run / "checkpoints/step-00000023"))
    assert result(run / "evaluate-val.json")["checkpoint"].endswith("step-00000023")
    evaluate_here()
    assert result(run / "evaluate-val.json")["checkpoint"].endswith("step-00000046")


def test_a_checkpoint_that_has_left_its_run(run, tmp_path):
    moved = (run / "checkpoints/step-00000046").rename(tmp_path / "mine")
    evaluate_here("--checkpoint", str(moved))
    assert result(tmp_path / "mine-evaluate-val.json")["metrics"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run", "y"), "type   --run x"),
        (
            ("--checkpoint", "runs/x/nothing"),
            r"there is no such file or folder\n  type   runs/x/checkpoints/step-00000046",
        ),
        (("--root", "elsewhere"), "there are 0"),
        (("--run", "x", "--output", "/proc/x.json"), "folder you may write to"),
    ],
)
def test_mistakes(run, arguments, message):
    with pytest.raises(CannotStart, match=message):
        evaluate_here(*arguments)
