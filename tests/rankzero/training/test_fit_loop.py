from functools import partialmethod, wraps

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from rankzero import Trainer as RunTrainer
from rankzero.distributed.monitoring.activity import SANITY_CHECK
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback, LoopHooks, Subscribers
from running import train_in_process
from stock import QUIET, SILENT, differences


class HookRecorder(LoopCallback):
    def __init__(self):
        self.seen = []

    def record(self, name, trainer, *arguments):
        loop = fit_loop_of(trainer)
        self.seen.append((name, loop.epochs_done, loop.epoch_loop.batches_done, loop.is_within_epoch))

    on_train_start, on_ready = partialmethod(record, "start"), partialmethod(record, "ready")
    on_validation_end, on_step_done = partialmethod(record, "validated"), partialmethod(record, "step")
    on_train_epoch_end, on_epoch_done = partialmethod(record, "epoch end"), partialmethod(record, "epoch")


def recorded_hooks(**settings):
    recorder = HookRecorder()
    train_in_process(recorder, loops=True, limit_train_batches=4, num_sanity_val_steps=0, **settings)
    return recorder.seen


def test_step_is_done_after_its_validation_and_epoch_after_its_hooks():
    assert recorded_hooks(max_epochs=1, val_check_interval=2) == [
        *(("start", 0, 0, False), ("ready", 0, 0, False), ("step", 0, 1, True)),
        *(("validated", 0, 2, True), ("step", 0, 2, True), ("step", 0, 3, True)),
        *(("validated", 0, 4, True), ("step", 0, 4, True), ("epoch end", 1, 4, False), ("epoch", 1, 4, False)),
    ]


def test_on_step_done_is_called_once_per_accumulated_step_and_on_epoch_done_only_for_complete_epochs():
    seen = recorded_hooks(max_steps=3, accumulate_grad_batches=3)
    assert [batches for hook, _, batches, _ in seen if hook == "step"] == [3, 4, 3]
    assert [hook for hook, *_ in seen if hook == "epoch"] == ["epoch"]


class Recorder(LoopHooks):
    """Subscriber that is not a Lightning callback."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def on_step_done(self, trainer):
        self.seen.append((self.name, "step", trainer))

    def on_batch_done(self, trainer, batch, batch_idx):
        self.seen.append((self.name, batch, batch_idx))


CallbackRecorder = type("CallbackRecorder", (Recorder, LoopCallback), {})


class Once(CallbackRecorder):
    """Needs only the hook of steps, and removes itself in the first one."""

    def needs(self, hook):
        return hook == "on_step_done"

    def on_step_done(self, trainer):
        super().on_step_done(trainer)
        self.table.remove("on_step_done", self)


def test_subscribers_are_called_while_they_need_a_hook_callbacks_in_their_order_and_others_after_them():
    seen, trainer = [], Trainer(**SILENT)
    trainer.callbacks[:] = [CallbackRecorder("a", seen), Callback(), LoopCallback(), once := Once("b", seen)]
    once.table = table = Subscribers(trainer, [LoopHooks(), Recorder("extra", seen)])
    counts = {hook: len(functions) for hook, functions in table.methods.items() if functions}
    assert counts == {"on_batch_done": 3, "on_step_done": 3}  # only implementations
    table.drop_unneeded()
    for _ in range(2):
        table.call("on_step_done")
    table.call("on_batch_done", "batch", 3)
    table.call("on_safe_point")
    steps = [(name, "step", trainer) for name in ("a", "b", "extra", "a", "extra")]
    assert seen == [*steps, ("a", "batch", 3), ("extra", "batch", 3)]


class BatchRecorder(Callback):
    def __init__(self, seen):
        self.seen = seen

    def record_call(self, hook, trainer, pl_module, *arguments):
        self.seen.append((hook, arguments[-1]))

    on_train_batch_start = partialmethod(record_call, "on_train_batch_start")
    on_train_batch_end = partialmethod(record_call, "on_train_batch_end")


class LoopBatchRecorder(BatchRecorder, LoopCallback):
    def on_logging_step(self, trainer):
        self.seen.append(("on_logging_step", trainer.global_step))

    def on_ready(self, trainer):
        fit_loop_of(trainer).epoch_loop.record.interval = trainer.log_every_n_steps  # as `IntervalMeasurements` does

    def record(self, hook, trainer, batch, batch_idx):
        assert batch.shape == (1, 32) and trainer.global_step == batch_idx + 1
        self.seen.append((hook, batch_idx))

    on_batch_done, on_tick = partialmethod(record, "on_batch_done"), partialmethod(record, "on_tick")


@pytest.mark.parametrize("fast", [True, False])
def test_batch_hooks_run_before_lightnings_and_on_tick_at_intervals_and_after_the_last_batch(fast, monkeypatch):
    monkeypatch.setattr("rankzero.training.loop.TICK_SECONDS", 3600)
    monkeypatch.setattr("rankzero.training.hooks.TICK_SECONDS", 3600)
    seen = []
    profiler = None if fast else "simple"  # with this profiler, Lightning's own loop trains
    callbacks = [BatchRecorder(seen), LoopBatchRecorder(seen)]
    settings = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0, "log_every_n_steps": 3}
    train_in_process(*callbacks, loops=True, profiler=profiler, **settings)
    batch_hooks = [(hook, batch_idx) for hook, batch_idx in seen if hook not in ("on_logging_step", "on_tick")]
    order = (*["on_train_batch_start"] * 2, "on_batch_done", *["on_train_batch_end"] * 2)
    assert batch_hooks == [(hook, batch_idx) for batch_idx in range(4) for hook in order]
    assert [entry for entry in seen if entry[0] == "on_logging_step"] == [("on_logging_step", 2)]
    assert seen.index(("on_logging_step", 2)) < seen.index(("on_train_batch_start", 2))
    assert [batch_idx for hook, batch_idx in seen if hook == "on_tick"] == [0, 3]
    assert seen[-4:-2] == [("on_batch_done", 3), ("on_tick", 3)]


class RecordsPhases(BoringModel):
    def __init__(self):
        super().__init__()
        self.phases = {}

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.record("on_before_batch_transfer" if self.trainer.training else "in validation")
        return batch

    def record(self, hook):
        self.phases.setdefault(hook, set()).add(self.trainer.fit_loop.epoch_loop.activity.phase)


def recording(hook):
    """Returns a hook that records the phase and calls the hook of BoringModel."""

    def method(self, *arguments):
        self.record(hook)
        return getattr(BoringModel, hook)(self, *arguments)

    return wraps(getattr(BoringModel, hook))(method)


PHASES = {"on_before_batch_transfer": {"data wait"}, "training_step": {"forward"}, "on_before_backward": {"backward"}}
PHASES |= {"on_before_optimizer_step": {"optimizer"}, "on_save_checkpoint": {"checkpoint"}}
PHASES |= {hook: {"hook"} for hook in ("on_train_start", "on_after_backward", "on_train_batch_end")}
PHASES |= {
    hook: {SANITY_CHECK, "validation"} for hook in ("in validation", "validation_step", "on_validation_epoch_end")
}
PHASES["on_train_epoch_end"] = {"checkpoint"}  # called after the callback that saves; a phase lasts until the next one
for _hook in PHASES.keys() - {"on_before_batch_transfer", "in validation"}:
    setattr(RecordsPhases, _hook, recording(_hook))


@pytest.mark.parametrize("in_lightnings_loop", [False, True])
def test_each_hook_runs_in_its_phase(cwd, monkeypatch, in_lightnings_loop):
    if in_lightnings_loop:
        monkeypatch.setattr("rankzero.training.epoch_loop.fallback_reason", lambda *_: "a test")
    model = RecordsPhases()
    saves = LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint("x.ckpt"))
    train_in_process(saves, model=model, loops=True, max_epochs=2, limit_train_batches=3)
    assert model.phases == PHASES


def test_the_place_of_an_error_in_validation_has_the_number_of_completed_steps(cwd):
    places, times = [], set()

    class Records(BoringModel):
        def validation_step(self, batch, batch_idx):
            activity = self.trainer.fit_loop.epoch_loop.activity
            places.append(activity.place)
            times.add(activity.since)

    train_in_process(model=Records(), loops=True, max_epochs=2, limit_train_batches=3, limit_val_batches=2)
    assert places == [place for place in (SANITY_CHECK, "validation at step 3", "validation at step 6") for _ in "ab"]
    assert len(times) == len(places)  # each batch is progress


def test_a_skipped_epoch_does_not_stay_in_the_forward_phase(cwd):
    model = RecordsPhases()
    model.on_train_batch_start = lambda batch, batch_idx: -1
    train_in_process(model=model, loops=True, max_epochs=1, limit_train_batches=3)
    assert model.phases["on_train_epoch_end"] == {"hook"}


class GrowingData(BoringModel):
    """Records the epochs in which its training loader is created, and those of its batches."""

    def __init__(self):
        super().__init__()
        self.created, self.batches = [], []

    def train_dataloader(self):
        self.created.append(self.trainer.current_epoch)
        return DataLoader(torch.eye(2 + self.trainer.current_epoch, 32))

    def on_train_batch_start(self, batch, batch_idx):
        self.batches.append((self.trainer.current_epoch, batch_idx))


@pytest.mark.parametrize(("failed_at", "created"), [((1, 0), [0, 2, 4]), ((1, 1), [0, 2, 4]), ((3, 2), [2, 4])])
def test_a_resumed_run_creates_its_loaders_in_the_epochs_of_an_uninterrupted_run(script_folder, failed_at, created):
    def script(name, fails_at=None):
        def fail(trainer, module, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == fails_at:
                raise RuntimeError("failed")

        torch.manual_seed(0)
        model, settings = GrowingData(), {"limit_val_batches": 0, "reload_dataloaders_every_n_epochs": 2, **QUIET}
        trainer = RunTrainer(name=name, max_epochs=6, save_every="1steps", seed=0, **settings)
        trainer.callbacks.append(LambdaCallback(on_train_batch_start=fail))
        trainer.fit(model)
        return model

    whole = script("whole")
    with pytest.raises(RuntimeError, match="failed"):
        script("x", failed_at)
    resumed = script("x")
    assert whole.created == [0, 2, 4] and resumed.created == created
    assert resumed.batches == whole.batches[whole.batches.index(failed_at) :]
    assert differences(resumed.state_dict(), whole.state_dict()) == []
