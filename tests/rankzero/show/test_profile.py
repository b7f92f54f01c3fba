import gzip
import io
import json
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.profiler import ProfilerActivity, profile

import rankzero
from rankzero import Trainer
from rankzero.distributed.monitoring.activity import DATA, Activity
from rankzero.messages import RequestError
from rankzero.show.profile import OPERATORS, TRACK, Profile, ProfileRequest, Recording, write_table
from running import disk_at, refusal_of, script_process
from stock import QUIET

ROUNDING = 0.01  # microseconds


class Net(BoringModel):
    def __init__(self, manual=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout = torch.nn.Linear(32, 2), torch.nn.Dropout(0.2)
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.dropout(self(batch)))
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss


def at_step(step, function):
    """Returns a callback that calls a function after a step."""
    return LambdaCallback(on_train_batch_end=lambda trainer, *_: trainer.global_step == step and function(trainer))


def train(steps=12, model=None, **settings):
    settings = {"limit_val_batches": 0, "max_epochs": 1, "name": "x", **settings}
    trainer = Trainer(limit_train_batches=steps, **QUIET, **settings)
    torch.manual_seed(3)
    try:
        trainer.fit(model or Net())
    finally:
        assert not torch._C._autograd._profiler_enabled()
        assert not trainer.session.coordinator.control_channel.monitor.activity.listeners
    return trainer


def trace_of(folder, attempt=1):
    path = folder / f"runs/x/profile/attempt-{attempt:04d}/rank-000.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def slices(events, name, on_track=False):
    named = [event for event in events if event["ph"] == "X" and event["name"].startswith(name)]
    return [event for event in named if (event.get("tid") == TRACK) == on_track]


def contains(outer, inner):
    """Returns whether a range contains another one, with a tolerance for floats of the time since 1970."""
    return outer["ts"] <= inner["ts"] + ROUNDING and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + ROUNDING


def numbers_of_steps(events):
    return [int(event["name"].removeprefix("step ")) for event in slices(events, "step ", on_track=True)]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The folder, the Trainer and the output of a run of 20 steps, of which four are profiled."""
    folder, out, err = tmp_path_factory.mktemp("profiled"), io.StringIO(), io.StringIO()
    with script_process(folder), redirect_stdout(out), redirect_stderr(err):
        trainer = train(20, profile="4steps")
    return folder, trainer, out.getvalue(), err.getvalue()


def test_trace_and_table_show_the_steps_after_the_warm_up(profiled):
    folder, _, out, err = profiled
    events = trace_of(folder)
    steps = slices(events, "step ", on_track=True)
    assert numbers_of_steps(events) == [6, 7, 8, 9]
    assert [step["name"] for step in slices(events, "ProfilerStep")] == [f"ProfilerStep#{n}" for n in range(6, 10)]
    parts = {name: slices(events, name, on_track=True) for name in ("data wait", "forward", "backward", "optimizer")}
    for step, *of_step in zip(steps, *parts.values(), strict=True):
        assert all(contains(step, part) for part in of_step)
        assert [part["ts"] for part in of_step] == sorted(part["ts"] for part in of_step)
    linear, gradient = slices(events, "aten::linear"), slices(events, "AddmmBackward0")
    assert len(linear) == len(gradient) == 4
    assert all(map(contains, parts["forward"], linear)) and all(map(contains, parts["backward"], gradient))
    table = (folder / "runs/x/profile/attempt-0001/rank-000.txt").read_text()
    assert table.startswith("Run x, attempt 1, rank 0: steps 6 to 9\n") and "aten::addmm" in table
    assert "forward" in table and " ms\n" in table and "CUDA" not in table
    (line,) = [line for line in out.splitlines() if "profiled" in line]
    assert line.startswith("rankzero: profiled steps 6 to 9: runs/x/profile/attempt-0001/rank-000.json.gz (open it at ")
    assert "https://ui.perfetto.dev or chrome://tracing" in line and line.endswith("/rank-000.txt")
    assert "slower training loop" not in out + err and err == ""


def test_no_range_of_a_thread_overlaps_another_without_being_nested(profiled):
    threads = {}
    for event in trace_of(profiled[0]):
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in threads.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        enclosing = []
        for event in events:
            while enclosing and enclosing[-1]["ts"] + enclosing[-1]["dur"] <= event["ts"] + ROUNDING:
                enclosing.pop()
            if enclosing:
                assert contains(enclosing[-1], event)
            enclosing.append(event)


def test_profiling_changes_no_weight_and_has_no_callback_without_the_flag(script_folder, profiled):
    trainer = train(20)
    assert not [callback for callback in trainer.callbacks if isinstance(callback, Profile)]
    weights = profiled[1].model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())


def test_steps_after_the_profile_call_no_hook_and_quiet_keeps_the_line_with_the_paths(script_folder, capsys):
    called = []

    def look(trainer):
        methods = trainer.fit_loop.epoch_loop.subscribers.methods["on_step_done"]
        called.append(any(isinstance(method.__self__, Profile) for method in methods))

    train(profile="2steps", callbacks=[at_step(6, look), at_step(8, look)], quiet=True)
    assert called == [True, False] and "rankzero: profiled steps 6 to 7: " in capsys.readouterr().out


@pytest.mark.parametrize(("profile", "steps"), [("2steps@7", [8, 9]), ("1step@2", [6])])
def test_a_profile_begins_after_the_requested_step_but_not_in_the_warm_up(profile, steps, script_folder):
    train(profile=profile)
    assert numbers_of_steps(trace_of(script_folder)) == steps


def test_a_resumed_attempt_keeps_the_profile_of_the_previous_one(script_folder):
    train(8, profile="2steps")
    path = script_folder / "runs/x/profile/attempt-0001/rank-000.json.gz"
    first = path.read_bytes()
    train(8, profile="2steps", max_epochs=2)
    assert path.read_bytes() == first and numbers_of_steps(trace_of(script_folder, attempt=2)) == [14, 15]


def fail(*arguments):
    raise RuntimeError("it failed")


@pytest.mark.parametrize(
    ("steps", "requested", "settings", "reason"),
    [
        (8, 10, {}, "training ended after step 8"),
        (12, 5, {"limit_val_batches": 3, "val_check_interval": 4}, "a validation began after step 8"),
        (12, 4, {"callbacks": [at_step(8, fail)]}, "training ended after step 8"),
    ],
    ids=["few steps", "validation", "error"],
)
def test_a_profile_that_ends_early_has_the_steps_before(steps, requested, settings, reason, script_folder, capsys):
    with pytest.raises(RuntimeError, match="it failed") if "callbacks" in settings else nullcontext():
        train(steps, profile=f"{requested}steps", **settings)
    events = trace_of(script_folder)
    assert len(numbers_of_steps(events)) == 3 and not slices(events, "validation", on_track=True)
    assert f"profiled 3 of {requested} steps, from step 6, because {reason}: " in capsys.readouterr().out


@pytest.mark.parametrize("profile", ["10steps", "10steps@5"])
def test_a_run_that_ends_before_the_profile_begins_reports_it(profile, script_folder, capsys):
    train(5, profile=profile)
    found = "training ended after step 5, and profiling begins after step 5"
    assert f'nothing was profiled (profile="{profile}"): {found}' in capsys.readouterr().err
    assert not (script_folder / "runs/x/profile").exists()


@pytest.mark.parametrize(
    ("model", "settings", "micro_batches"),
    [(Net, {"accumulate_grad_batches": 2}, 2), (partial(Net, manual=True), {}, 1), (Net, {"profiler": "simple"}, 1)],
    ids=["micro-batches", "manual optimization", "Lightning's loop"],
)
def test_each_step_contains_its_parts(model, settings, micro_batches, script_folder):
    train(16, model=model(), profile="2steps", **settings)
    events = trace_of(script_folder)
    steps = slices(events, "step ", on_track=True)
    assert numbers_of_steps(events) == [6, 7] and len(slices(events, "ProfilerStep")) == 2
    for step in steps:
        for name in ("data wait", "forward", "backward", "optimizer"):
            inside = [part for part in slices(events, name, on_track=True) if contains(step, part)]
            assert len(inside) == (1 if name == "optimizer" else micro_batches), name
    assert steps[0]["ts"] + steps[0]["dur"] <= steps[1]["ts"] + ROUNDING


def test_a_stop_in_a_profiled_step_writes_the_steps_before_it(script_folder):
    def stop(trainer):
        trainer.session.coordinator.control_channel.request_stop("the test")

    with pytest.raises(rankzero.Stopped):
        train(200, profile="190steps", callbacks=[at_step(8, stop)])
    assert len(numbers_of_steps(trace_of(script_folder))) >= 3


def test_a_full_disk_does_not_end_training(script_folder, capsys):
    with disk_at(script_folder / "disk", "512k") as disk:
        for folder in (disk / "x/profile", script_folder / "runs/x"):
            folder.mkdir(parents=True)
        (script_folder / "runs/x/profile").symlink_to(disk / "x/profile")
        (disk / "filler").write_bytes(bytes(500 << 10))
        assert train(profile="4steps").global_step == 12
        remaining = [path for path in (disk / "x").rglob("*") if path.is_file()]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "profile" in line]
    assert "the profile could not be written (profile=" in line and "No space left on device" in line
    assert not [path for path in remaining if path.name.endswith((".json.gz", ".saving"))]


def test_another_profiler_keeps_running(script_folder, capsys):
    other = profile(activities=[ProfilerActivity.CPU])
    train(profile="2steps", callbacks=[at_step(4, lambda _: other.start()), at_step(10, lambda _: other.stop())])
    assert "training is not affected: another profiler of torch is running" in capsys.readouterr().err
    assert any(event.name == "aten::linear" for event in other.events())


def stop_and_fail(self, stop=profile.stop_trace):
    stop(self)
    fail()


@pytest.mark.parametrize(
    ("name", "function", "found"),
    [
        *((name, fail, "it failed") for name in ("prepare_trace", "start_trace", "key_averages")),
        ("stop_trace", stop_and_fail, "it failed"),
        (
            "export_chrome_trace",
            lambda _, path: Path(path).write_text('{"traceEvents": ['),
            "torch could not write its trace to ",
        ),
    ],
)
def test_an_error_of_the_profiler_ends_no_training(name, function, found, script_folder, capsys, monkeypatch):
    monkeypatch.setattr(profile, name, function)
    assert train(profile="2steps").global_step == 12
    err = capsys.readouterr().err
    assert err.count("the profile could not be written") == err.count(f"training is not affected: {found}") == 1
    assert not (script_folder / "runs/x/profile/attempt-0001/rank-000.json.gz").exists()


@pytest.mark.parametrize(
    ("profile", "ranks", "world", "found", "instead"),
    [
        (None, "1", 2, "without --profile", "--profile 10steps --profile_ranks 1"),
        ("10steps", "0,2,3", 3, "the run has 3 processes, ranks 0 to 2", "--profile_ranks 0,2"),
        ("10steps", "1", 1, "the run has one process, rank 0", "--profile_ranks all"),
    ],
)
def test_ranks_that_cannot_be_profiled_are_refused(profile, ranks, world, found, instead, script_folder):
    with pytest.raises(RequestError, match="the run has one process, rank 0"):
        Trainer(profile="2steps", profile_ranks=[0, 1], **QUIET)
    assert not (script_folder / "runs").exists()
    error = refusal_of(ProfileRequest.read, profile, ranks, world)
    assert error.asked == f"--profile_ranks {ranks}" and found in error.found and error.instead == instead


def test_the_table_of_a_gpu_has_a_second_section(tmp_path):
    """The section is written without CUDA times: no test of this project has run on CUDA."""
    recording = Recording(Activity(), "cpu")
    recording.enter(DATA)
    torch.ones(3) @ torch.ones(3)
    recording.end()
    recording.has_cuda = True
    write_table(tmp_path / "rank-000.txt", recording, "the title")
    text = (tmp_path / "rank-000.txt").read_text()
    assert text.startswith("the title\n\nMean time of each part")
    assert f"The {OPERATORS} operators with the most self CPU time:\n---" in text
    assert f"The {OPERATORS} operators with the most self CUDA time:\n---" in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
