import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reported import ENVIRONMENT, SUMMARY, make_run, write_curves

from rankzero.runs.directory import RunDirectory
from rankzero.runs.metrics_file import METRICS_FILE, Row, append_rows
from rankzero.show.report import page as report_module
from rankzero.show.report.page import REPORT, next_commands, render, write_report
from rankzero.show.tensorboard_logger import DurableTensorBoardLogger

HOSTILE = "<script>alert(1)</script><img src=http://x/y onerror=alert(1)>\"'&{{7*7}}\x1b[31m\u202e\udcff"
VOID = {"meta", "img", "input"}


class Page(HTMLParser):
    """Collects the visible text and all tags of a page, and checks that elements are nested correctly."""

    def __init__(self, text):
        super().__init__()
        self.words, self.tags, self.attributes, self._open = [], [], [], []
        self.feed(text)
        self.close()
        self.text = " ".join(self.words)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.words += data.split()


def page_of(run, summary):
    return Page(render(run, summary))


@pytest.fixture
def made(tmp_path):
    return make_run(tmp_path / "x")


def test_the_report_of_a_finished_run_contains_everything_and_needs_no_network_and_no_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, summary = make_run(Path("runs/x"))
    assert write_report(run, summary) == Path("runs/x/report.html")
    content = Path("runs/x/report.html").read_text()
    assert not re.search(r"https?:|//|@import|url\(|<script|<link|<iframe| on\w+=", content)
    assert "default-src 'none'" in content
    page = Page(content)
    for text in (
        "x finished 2 nodes, 2 processes on NVIDIA H100 80GB HBM3, without a launcher",
        "val/loss 0.25 val/accuracy 0.9167 epochs 3 steps 300 samples 4,311 samples/s 19,459 duration 2 h 2 min",
        "Evaluate the newest checkpoint: python launch/evaluate.py --name x",
        "tensorboard --logdir runs --host localhost Run the commands in the folder /home/user/work",
        "Curves Horizontal axis steps samples epochs",
        "loss no unit train/loss 0.123 0.0425 to 2.013 val/loss 0.22 0.22 to 1.021",
        *("learning rate no unit", "speed samples/s", "gradient norm no unit", "device memory GiB 41.5"),
        *("ms per step, on average", "backward pass 50.2 %", "No slow rank was found in the last attempt."),
        "time to the first gradient ms rank 000 14 rank 001 19",
        "0 300 2 h 2 min finished python launch/fit.py --epochs 9 --devices 2",
        "epochs 1 to 3: 1,437 of 1,437 samples per epoch, each once",
        *("checkpoints/step-00000300 newest 300 3", "checkpoints/step-00000200 best 200 2"),
        "local (--devices 2) hosts node-1: 1 process, node-2: 1 process",
        "Python 3.11.9, torch 2.10.0, CUDA 12.8, lightning 2.6.6, rankzero 0.2.0",
        f"commit {ENVIRONMENT['commit']}",
        "2 settings of the last attempt model.class_path MLP seed_everything 7",
    ):
        assert text in page.text, text
    assert "Error" not in page.words and "dashed" not in page.words and "Resume:" not in page.words


@pytest.mark.parametrize("is_own_curve", [True, False])
def test_two_values_of_the_training_loss_have_different_names(made, is_own_curve):
    run, summary = made
    if not is_own_curve:
        DurableTensorBoardLogger(run).log_metrics({"train/mean_loss": 1.0}, 0)
    summary["metrics"] = {"train/loss": 0.375}
    name = "train/loss as logged by the model" if is_own_curve else "train/loss"
    assert f"launcher {name} 0.375 epochs" in page_of(run, summary).text


def test_similar_epochs_and_attempts_are_listed_together_many_are_limited_and_their_curves_continue(tmp_path):
    ledger = [f"epoch {epoch}: 1,437 of 1,437 samples, each once" for epoch in range(1, 31)]
    ledger += ["epoch 31: 900 of 1,437 samples, each once", "epoch 32: 10 of 1,437 samples, each once so far"]
    run, summary = make_run(tmp_path / "x", (0, 120), ledger=ledger)
    text = page_of(run, summary).text
    assert (
        "Samples epochs 1 to 30: 1,437 of 1,437 samples per epoch, each once epoch 31: 900 of 1,437 samples, each once "
        "epoch 32: 10 of 1,437 samples, each once so far Checkpoints"
    ) in text
    assert text.count("python launch/fit.py --epochs 9 --devices 2") == text.count("the same command") == 1
    for _ in range(98):
        run.begin_attempt("", None, 300)
    ledger = [f"epoch {epoch}: {epoch} of 1,000 samples, each once" for epoch in range(1, 1001)]
    text = page_of(run, {**summary, "ledger": ledger, "attempts": 100}).text
    assert "The ledger of earlier epochs is in summary.json. epoch 989:" in text
    assert "50 earlier attempts are not listed" in text
    write_curves(run, 200, 300, attempt=3)  # continues the curves of the attempt before
    for line in re.findall(r'class="line" points="([^"]+)"', render(run, summary)):
        positions = [float(point.split(",")[0]) for point in line.split()]
        assert positions == sorted(set(positions))


def test_the_report_of_a_stopped_run_shows_reason_attempts_and_the_command_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slow = "rank 1 on node-2 is slow"
    changes = {"status": "stopped", "reason": "the time limit", "slow_ranks": [slow]}
    text = render(*make_run(Path("runs/x"), (0, 120, 210), **changes))
    page = Page(text)
    assert "Reason for the stop the time limit" in page.text and slow in page.text
    assert "Resume: python launch/fit.py --epochs 9 --devices 2 --name x" in page.text
    assert "A dashed line marks the step at which another attempt began." in page.text
    charts = page.tags.count("svg")
    assert charts == 8 and text.count('class="attempt"') == 2 * charts
    assert text.count(f'<span style="left: {100 * 120 / 299:.2f}%">2</span>') == charts
    assert "0 160 1 min 5 s stopped" in page.text and "815.pbs 120 250 1 min 5 s stopped" in page.text


def test_the_report_of_a_failed_run_shows_the_error_and_shortens_a_long_one(made):
    run, summary = made
    summary |= {"status": "failed", "checkpoint": None}
    error = 'Traceback:\n  File "train.py", line 3\nIndexError: no such <layer>\nin forward at step 7'
    text = render(run, {**summary, "reason": error})
    assert "IndexError: no such &lt;layer&gt;\nin forward at step 7</pre>" in text
    assert 'class="status failed"' in text
    page = page_of(run, {**summary, "reason": "first " + "word " * 10_000 + "last"})
    assert "Error first word" in page.text and "word last" in page.text and len(page.text) < 20_000


def test_hostile_names_and_texts_are_shown_as_text_and_secrets_are_left_out(tmp_path):
    command = [HOSTILE, "--api_key", "value-1", "--logger.token=value-2", "--model.num_tokens=512"]
    environment = {**ENVIRONMENT, "device": HOSTILE, "hosts": {HOSTILE: 1}, "command": command, "folder": HOSTILE}
    changes = {"metrics": {HOSTILE: 1.0}, "ledger": [HOSTILE], "slow_ranks": [HOSTILE], "reason": HOSTILE}
    run, summary = make_run(tmp_path / "x", environment={}, status="failed", run=HOSTILE, **changes)
    run.write_environment(environment)
    harmless = HOSTILE.replace("\udcff", "")
    writer = DurableTensorBoardLogger(run)
    writer.log_metrics({f"val/{harmless}": 1.0, f"world/a/rank_001{harmless}": 1.0}, 5)
    writer.finalize("success")
    settings = "logger:\n  password: value-3\nmodel:\n  num_tokens: 512\n"
    (run.path / "config.yaml").write_text("'<script>alert(1)</script>': '<script>'\n" + settings)
    (run.path / "figures").mkdir()
    (run.path / "figures" / '<script>"onload=alert(1).png').write_bytes(b"image")
    text = render(run, summary)
    page = Page(text)
    assert "script" not in page.tags and "alert(1)" in page.text and "<script>" in page.text
    assert {name for name, _ in page.attributes if name.startswith("on")} == set()
    assert [value for name, value in page.attributes if name == "src"] == ["data:image/png;base64,aW1hZ2U="]
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\ud800-\udfff]", text) and "49" not in page.words
    assert "value-" not in text and "--model.num_tokens=512" in text and "--api_key ..." in text


def test_a_run_without_curves_and_environment_and_with_a_damaged_configuration_has_a_report(tmp_path):
    run, summary = make_run(tmp_path / "x", environment={}, status="stopped")
    shutil.rmtree(run.path / "tensorboard")
    (run.path / METRICS_FILE).unlink()
    for content in ("a: [", "a: *b", "- 1"):
        (run.path / "config.yaml").write_text(content)
        page = page_of(run, summary)
        assert "This run has logged no values." in page.text
        assert "Resume: the same command with --name x" in page.text
        assert not {"Environment", "Configuration", "tensorboard"} & set(page.words) and "svg" not in page.tags


def test_a_failure_before_the_first_step_of_a_first_or_superseded_attempt_is_not_reported(tmp_path, capsys):
    run, summary = make_run(tmp_path / "x", steps=0)
    assert write_report(run, summary) is None and not (run.path / REPORT).exists()
    run, summary = make_run(tmp_path / "y", (0, 120), steps=0, status="failed", reason="no such layer")
    (run.path / "attempts/0001/summary.json").unlink()
    assert "0 ended without a summary" in page_of(run, summary).text  # a killed attempt
    assert write_report(run, summary) == run.path / REPORT
    (run.path / REPORT).unlink()
    RunDirectory(run.path).begin_attempt("model: {class_path: Net}\n")
    assert write_report(run, summary) is None and not (run.path / REPORT).exists()
    assert capsys.readouterr().err == ""


def test_the_newest_figures_and_a_part_of_long_curves_give_a_small_page_and_what_is_no_file_is_ignored(made):
    run, summary = made
    folder = run.path / "figures"
    (folder / "directory.png").mkdir(parents=True)
    (folder / "dangling.png").symlink_to("missing")
    (folder / "huge.png").write_bytes(bytes(report_module.MAX_FIGURE_BYTES + 1))
    for number in range(report_module.MAX_FIGURES + 2):
        file = folder / f"name_{100 - number}.png"
        file.write_bytes(b"\x89PNG")
        os.utime(file, (number, number))
    rows = (Row(step, 1.0 * step, {"val/noise": float(step * 7919 % 1000)}) for step in range(20_000))
    append_rows(run.path, rows, durably=False)
    text = render(run, {**summary, "steps": 20_000})
    assert "<h3>name 98</h3>" in text and 'aria-label="name 98 at full size"' in text
    assert '<img src="data:image/png;base64,iVBORw==" alt="name 98">' in text and "huge" not in text
    assert text.count("<figure") - text.count('<figure class="chart') >= report_module.MAX_FIGURES
    assert "name 99" not in text and "name 100" not in text
    assert "Older or larger images in the folder figures: 3" in text
    assert "val/noise" in text and len(text) < 200_000 and "Of long curves, a part of the values is drawn" in text
    assert "999" in Page(text).text


def commands(run="runs/x", status="stopped", has_curves=False, summary=None, **environment):
    """Returns pairs of purpose and command."""
    summary = {**SUMMARY, "status": status, **(summary or {})}
    found = next_commands(RunDirectory(Path(run)), summary, {**ENVIRONMENT, **environment}, has_curves)
    return [tuple(command) for command in found]


FIT = ["python", "fit.py"]
IN_TORCHRUN = ", with the launch line of torchrun; each process runs"
SECRET = ["fit.py", "--api_key", "abc", "--name", "x"]


@pytest.mark.parametrize(
    ("environment", "purpose", "expected"),
    [
        ({"command": ["fit.py"]}, "", "fit.py --name x"),
        ({"command": ["fit.py", "--name", "x"]}, "", "fit.py --name x"),
        ({"command": ["fit.py", "--run_name=x", "--resume=never"]}, "", "fit.py --run_name=x"),
        ({"command": ["fit.py", "--resume", "runs/y", "--epochs", "3"]}, "", "fit.py --epochs 3 --name x"),
        ({"command": ["fit.py", "--model.sizes", "[4, 8]"]}, "", "fit.py --model.sizes '[4, 8]' --name x"),
        ({"launcher": "torchrun", "command": FIT}, IN_TORCHRUN, "python fit.py --name x"),
        ({"command": SECRET}, ", with the secret values in place of ...", "fit.py --api_key ... --name x"),
        ({"is_script": True, "command": FIT}, ": the same command with --name x", "python fit.py"),
    ],
)
def test_the_command_to_resume_is_the_typed_one_with_the_name_of_the_run(environment, purpose, expected):
    assert commands(**environment) == [(f"Resume{purpose}", expected)]


def test_a_finished_run_is_evaluated_if_a_command_has_trained_it():
    assert commands(status="finished", has_curves=True) == [
        ("Evaluate the newest checkpoint", "python launch/evaluate.py --name x"),
        ("Show all curves", "tensorboard --logdir runs --host localhost"),
    ]
    command = [".venv/bin/python", "-u", "../launch/fit.py", "--epochs", "3"]
    ((_, evaluate),) = commands(status="finished", command=command)
    assert evaluate == ".venv/bin/python -u ../launch/evaluate.py --name x"
    assert "--root 'my runs'" in commands(run="my runs/x", status="finished")[0][1]
    for settings in ({"is_script": True}, {"summary": {"checkpoint": None}}, {"summary": {"can_validate": False}}):
        assert commands(status="finished", **settings) == []


def test_a_failed_run_without_a_checkpoint_starts_again_from_the_same_one_and_a_job_is_resumed_with_submit(tmp_path):
    failed = {"status": "failed", "summary": {"checkpoint": None}}
    for environment in ({}, {"command": []}, {"is_script": True}):
        ((purpose, _),) = commands(**failed, **environment)
        assert purpose.startswith("Start again")
    ((_, command),) = commands(**failed, command=["fit.py", "--resume", "runs/y"])
    assert command == "fit.py --resume runs/y --name x"
    (tmp_path / "x.job.sh").touch()
    ((_, command),) = commands(run=tmp_path / "x")
    assert command == f"python launch/submit.py resume x --root {tmp_path}"
