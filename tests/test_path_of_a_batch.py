"""Limits the files that CONTRIBUTING lists for one batch, and the files that a steady step enters."""

import re
import sys
from pathlib import Path

from rankzero.training import loop
from rankzero.training.hooks import LoopCallback
from running import REPOSITORY, fit_in_process

MAX_FILES_TO_READ, MAX_FILES_ENTERED = 7, 9

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


def tables():
    """Returns the files in the two tables of CONTRIBUTING: those to read for one batch, and those of each step."""
    section = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("## One batch")[2].partition("\n## ")[0]
    read, _, entered = section.partition("A steady step")
    return [re.findall(r"^\| `([\w/]+\.py)` \|", text, re.MULTILINE) for text in (read, entered)]


def test_contributing_lists_at_most_seven_files_to_read_for_one_batch():
    listed, of_each_step = tables()
    assert 0 < len(listed) <= MAX_FILES_TO_READ
    assert [name for name in listed + of_each_step if not (REPOSITORY / name).is_file()] == []


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
    listed, of_each_step = tables()
    assert sorted(entered) == sorted({*of_each_step, *entered.intersection(listed)})
    assert len(entered) <= MAX_FILES_ENTERED, sorted(entered)
