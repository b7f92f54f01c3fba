import json
from types import SimpleNamespace

from rankzero.cli.arguments import parse_arguments
from rankzero.commands import preflight
from rankzero.distributed.world import World
from rankzero.preflight.check import CHECK_NAMES
from running import refusal_of, restore_process_state

TOY = ("--model", "MLP", "--data", "Toy")


def check_in_process(*arguments):
    with restore_process_state():
        return preflight.preflight(parse_arguments(preflight.PREFLIGHT, arguments), World())


def test_one_process_is_fit_to_train_and_nothing_remains_but_the_json_file(cwd, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "STARTED", 10.0)
    monkeypatch.setattr(preflight, "time", SimpleNamespace(monotonic=iter((10.5, 13.0)).__next__))
    assert check_in_process(*TOY, "--json", "new/out.json", "--warn_gbps", "10") == 0
    assert [path.name for path in cwd.rglob("*")] == ["new", "out.json"]
    content = json.loads((cwd / "new/out.json").read_text())
    assert content["fit_to_train"] and [check["name"] for check in content["checks"]] == list(CHECK_NAMES)
    checks = {check["name"]: check for check in content["checks"]}
    assert checks["rendezvous"]["values"]["seconds"] == 0.5 and checks["imports"]["values"]["seconds"] == [2.5]
    assert checks["data"]["values"]["ranks"][0]["samples"] == "2,048" and content["thresholds"]["warn_gbps"] == 10.0
    assert capsys.readouterr().out.splitlines()[-1] == "verdict: fit to train"


def test_a_model_whose_step_fails_or_data_that_cannot_be_read_is_not_fit_to_train(cwd, add_module, capsys):
    assert check_in_process(*TOY, "--model.in_features", "7") == 1
    printed = capsys.readouterr().out
    assert "fail     training steps   a step of the model fails" in printed
    assert "verdict: not fit to train: training steps" in printed
    add_module(
        "unreadable",
        "from lightning.pytorch.demos.boring_classes import BoringModel, BoringDataModule\n"
        "class Data(BoringDataModule):\n"
        "    def setup(self, stage):\n        raise FileNotFoundError('/data/train')\n",
    )
    assert check_in_process("--model", "unreadable.BoringModel", "--data", "unreadable.Data") == 1
    printed = capsys.readouterr().out
    assert "FileNotFoundError: /data/train" in printed and "skipped  training steps   data failed" in printed


def test_a_json_file_that_cannot_be_written_is_refused_and_an_earlier_one_is_removed(cwd):
    (cwd / "out.json").write_text('{"fit": true}')
    refusal_of(check_in_process, "--model", "missing.Model", "--json", "out.json")
    assert list(cwd.iterdir()) == []
    (cwd / "file").write_text("")
    for file in ("file/out.json", "."):
        assert f"--json {file}" in refusal_of(check_in_process, *TOY, "--json", file).asked
