import json
import sys

from reported import ENVIRONMENT, read_json

from rankzero import __version__
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.environments.launch import RequestedWorld
from rankzero.distributed.world import World
from rankzero.runs.directory import RunDirectory
from rankzero.runs.summary import describe_environment
from rankzero.show.terminal import ResultDisplay, _print, print_evaluation, print_predictions
from running import evaluate_in_process, fit_in_process, world_of

TOY = ("--model", "MLP", "--data", "Toy", "--epochs", "1", "--run", "x")


def test_the_table_lists_the_report_and_offers_tensorboard_only_for_event_files(cwd, capsys):
    fit_in_process(*TOY)
    out = capsys.readouterr().out
    assert "tensorboard --logdir runs --host localhost" in out and "│ report      │ runs/x/report.html  " in out
    page, run = (cwd / "runs/x/report.html").read_text(), RunDirectory(cwd / "runs/x")
    assert "1 node, 1 process on cpu" in page and "train/loss" in page
    environment = read_json(run, "attempts/0001/environment.json")
    assert environment["folder"] == str(cwd) and sum(environment["hosts"].values()) == 1
    assert read_json(run, "attempts/0001/summary.json") == read_json(run, "summary.json")
    logger = ("--trainer.logger", "lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir", "csv")
    fit_in_process(*TOY[:-1], "y", *logger)
    out = capsys.readouterr().out
    assert "tensorboard --logdir runs" in out and "csv/lightning_logs/version_0/metrics.csv" in out
    fit_in_process(*TOY[:-1], "z", "--trainer.logger", "false")
    out = capsys.readouterr().out
    assert "tensorboard" not in out.lower() and "metrics.csv" not in out


def test_a_report_whose_code_cannot_be_imported_at_the_end_does_not_fail_the_run(cwd, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rankzero.show.report.page", None)
    assert fit_in_process(*TOY) == 0
    printed = capsys.readouterr()
    assert "report.html could not be written: ModuleNotFoundError" in printed.err and "run x: finished" in printed.out


ONE_PROCESS = world_of("cpu")
METRICS = {"loss": 2.0, "loss_step": 2.0, "loss_epoch": 1.0, "bad": None}


def print_summary(run, metrics, status="finished", world=ONE_PROCESS, **changes):
    numbers = {"epochs": 1, "steps": 2, "samples": 3, "samples_per_second": 1.0, "seconds": 1.0, "max_epochs": 1}
    summary = {"launcher": "local", "ledger": [], "slow_ranks": [], "checkpoint": None, **numbers, **changes}
    summary |= {"status": status, "metrics": metrics, "attempts": 2}
    print(ResultDisplay(None, run, world).result_text(summary, has_colors=True))


def test_a_problem_is_wrapped_and_red_in_a_terminal(capsys, tmp_path, monkeypatch):
    problem = "the weights are not finite: " + "NaN in a layer, " * 10
    print_summary(RunDirectory(tmp_path / "x"), {}, problem=problem)
    plain = capsys.readouterr().out
    assert "\x1b" not in plain and all(len(line) < 110 for line in plain.splitlines() if "NaN" in line)
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_summary(RunDirectory(tmp_path / "x"), {}, problem=problem)
    assert "\x1b[31mproblem" in capsys.readouterr().out


def test_the_table_shows_a_metric_once_also_with_the_name_of_a_row_and_wraps_no_long_path_in_a_pipe(capsys, tmp_path):
    print_summary(RunDirectory(tmp_path / "x"), METRICS)
    out = capsys.readouterr().out
    assert "1 samples/s; 1.0 s in attempt 2" in out
    assert out.count("loss") == 1 and "│ 1 " in out and "not finite" in out and "│ local: 1 x 1 cpu" in out
    print_summary(RunDirectory(tmp_path / "x"), METRICS, world=world_of("cpu", size=3, nodes=2, devices=2))
    assert "│ local: 3 processes on 2 nodes, cpu" in capsys.readouterr().out
    _print("a title", [("checkpoint", path := "/a/path" * 30)])
    assert path in capsys.readouterr().out
    result = {"run": "x", "split": "val", "checkpoint": "step-9", "samples": 5, "world_size": 1}
    print_evaluation({**result, "metrics": {"samples": 7.0, "checkpoint": 1.0}}, tmp_path / "x.json")
    out = capsys.readouterr().out.count
    assert out("step-9") == out("5, each once") == 1 and out("│ samples ") == out("│ checkpoint ") == 2


def test_a_quiet_result_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("rankzero.show.terminal.is_quiet", lambda: True)
    run = RunDirectory(tmp_path / "x")
    print_summary(run, METRICS)
    print_summary(run, {}, "stopped", checkpoint="checkpoints/step-00000002")
    print_summary(run, {}, "failed")
    print_summary(run, {f"metric_{number}": 0.5 for number in range(100)})
    finished, stopped, failed, long = capsys.readouterr().out.splitlines()
    assert finished == f"run x: finished, bad not finite, loss 1, {run.path}"
    assert stopped == f"run x: stopped, {run.path}; to resume: the same command with --name x"
    assert failed == f"run x: failed, {run.path}; to start again: the same command with --name x"
    assert " more, " in long and len(long) <= max(120, 40 + len(str(run.path)))


def test_quiet_evaluations_and_predictions_print_one_line(cwd, capsys):
    fit_in_process(*TOY, "--quiet")
    evaluate_in_process("--run", "x", "--quiet")
    result, metrics = capsys.readouterr().out.splitlines()
    assert result.startswith("run x: finished, ") and result.endswith(", runs/x")
    assert metrics.startswith("val split of x: ") and metrics.endswith(", runs/x/evaluate-val.json")
    print_predictions({"run": "x", "split": "test", "samples": {"a.pt": 3, "b.pt": 4}}, cwd)
    assert capsys.readouterr().out == f"predictions of x for its test samples: 7 samples, {cwd}\n"
    evaluate_in_process("--run", "x")
    out = capsys.readouterr().out
    assert "checkpoint" in out and ", each once, on 1 process " in out


def test_the_environment_is_json_without_secrets_and_has_all_fields_of_the_report(cwd, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--token", "abc", "--width", "8"])
    coordinator = Coordinator(World(), RequestedWorld())
    environment = describe_environment(Session(RequestedWorld(), coordinator, "", is_script=True))
    assert json.loads(json.dumps(environment)) == environment and set(environment) == set(ENVIRONMENT)
    assert (environment["folder"], environment["rankzero"]) == (str(cwd), __version__)
    assert environment["is_script"] and environment["backend"] is None and environment["device"].startswith("cpu (")
    assert environment["command"][-4:] == ["--token", "...", "--width", "8"]
