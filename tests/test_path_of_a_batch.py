"""CONTRIBUTING lists the files to read, and exactly those that a steady step enters, of which there are few."""

import re
import sys
from pathlib import Path

from rankzero.training import loop
from rankzero.training.hooks import LoopCallback
from running import REPOSITORY, fit_in_process

SOURCES = [REPOSITORY / name for name in ("launch", "project/rankzero", "lightning_modules", "data_modules")]

ENTERED = {}
"""Source files whose code runs during a step, for each of some steps that log no value."""


class Trace(LoopCallback):
    def on_step_done(self, trainer):
        step = trainer.global_step
        sys.setprofile(self.recorder(ENTERED.setdefault(step, set())) if 21 < step < 30 else None)

    def recorder(self, files):
        def record_call(frame, event, argument):
            file = Path(frame.f_code.co_filename)
            if event == "call" and any(file.is_relative_to(folder) for folder in SOURCES):
                files.add(str(file.relative_to(REPOSITORY)))

        return record_call


def files_in(heading):
    """Returns the files in the first column of the table below a heading of CONTRIBUTING."""
    section = (REPOSITORY / "CONTRIBUTING.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)


def test_contributing_lists_25_files_to_read_and_each_exists():
    listed = files_in("Reading list")
    assert len(set(listed)) == len(listed) == 25
    assert [name for name in listed + files_in("The path of a batch") if not (REPOSITORY / name).is_file()] == []


def test_a_steady_step_enters_at_most_nine_files(cwd, monkeypatch):
    module = type(sys)("traced")
    module.Trace = Trace
    monkeypatch.setitem(sys.modules, "traced", module)
    monkeypatch.setattr(loop, "TICK_SECONDS", 3600)  # on a busy machine, every step is as long as a tick
    ENTERED.clear()
    toy = ("--model", "MLP", "--data", "Toy", "--data.count", "2048", "--epochs", "1", "--trainer.callbacks")
    assert fit_in_process(*toy, "traced.Trace") == 0
    assert len(ENTERED) == 8
    entered = sorted(ENTERED.values(), key=len)[4]  # a line of progress may be due in one of the steps
    assert sorted(entered) == sorted(files_in("The path of a batch"))
    assert len(entered) <= 9
