"""Our loop beside Lightning's own: the same weights to the bit, the same hooks in the same order, the same values."""

import copy
import sys

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.trainer import call
from stock import BATCHES, SIZE, Loaders, Net, Unsized, every_hook, hooks_of_module, same, train, with_methods
from torch import nn
from torch.utils.data import DataLoader

from rankzero.training import epoch_loop
from rankzero.training.fast import replaced
from rankzero.training.fit_loop import fit_loop_of


def step_lr(every=3):
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


def returns_dict(self, batch, batch_idx):
    return {"loss": Net.training_step(self, batch, batch_idx), "more": batch_idx}


def returns_nothing_at_times(self, batch, batch_idx):
    loss = Net.training_step(self, batch, batch_idx)
    return None if batch_idx % 3 == 2 else loss


def takes_no_index(self, batch):
    return Net.training_step(self, batch, 1)


def own_optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
    if batch_idx % 2 == 0:
        optimizer.step(closure=optimizer_closure)
    else:
        optimizer_closure()


def own_backward(self, loss):
    (loss * 0.5).backward()


def own_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
    self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


def own_schedule_step(self, scheduler, metric):
    scheduler.step()
    scheduler.step()


def moves_batches(self, batch, dataloader_idx):
    return [part * 2 for part in batch]


def logs_in_a_hook(self, batch, batch_idx):
    self.log("begun", float(batch_idx))
    self.log("loss", 3.0)


class Stop(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == 3


class ExchangesGradients(Callback):
    def on_after_backward(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.grad.mul_(0.5)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        optimizer.param_groups[0]["lr"] = 0.01 * (trainer.global_step + 1)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


CASES = {
    "nothing special": (Net, {}),
    "gradient accumulation": (Net, {"accumulate_grad_batches": 2}),
    "gradient accumulation, and a rest": (Net, {"accumulate_grad_batches": 2, "limit_train_batches": 5}),
    "clipping by norm": (Net, {"gradient_clip_val": 0.01}),
    "clipping by value": (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "a schedule of steps": (lambda: Net(schedule=step_lr(), interval="step"), {}),
    "a schedule of every second step": (lambda: Net(schedule=step_lr(), interval="step", frequency=2), {}),
    "a schedule of steps, accumulating": (
        lambda: Net(schedule=step_lr(2), interval="step"),
        {"accumulate_grad_batches": 2},
    ),
    "a schedule of epochs": (lambda: Net(schedule=step_lr(1), interval="epoch"), {"max_epochs": 3}),
    "a plateau of epochs": (lambda: Net(schedule=plateau, monitor="val"), {"max_epochs": 4}),
    "a plateau of steps": (lambda: Net(schedule=plateau, monitor="loss", interval="step"), {}),
    "a plateau of another metric": (lambda: Net(schedule=plateau, monitor="both_epoch"), {"max_epochs": 4}),
    "max_steps": (Net, {"max_steps": 5, "max_epochs": -1}),
    "max_steps in the second epoch": (Net, {"max_steps": 11, "max_epochs": -1}),
    "max_steps, accumulating": (Net, {"max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": 2}),
    "limit_train_batches": (Net, {"limit_train_batches": 3}),
    "half of the batches": (Net, {"limit_train_batches": 0.5}),
    "val_check_interval": (Net, {"val_check_interval": 0.25}),
    "val_check_interval in batches": (Net, {"val_check_interval": 3}),
    "validation by batches over epochs": (Net, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
    "validation every second epoch": (Net, {"check_val_every_n_epoch": 2, "max_epochs": 3}),
    "no validation": (Net, {"limit_val_batches": 0}),
    "a rest of a batch": (Net, {"loaders": Loaders(BATCHES * SIZE - 3)}),
    "a log of every step": (Net, {"log_every_n_steps": 1}),
    "a log of few steps": (Net, {"log_every_n_steps": 5, "max_epochs": 3}),
    "fast_dev_run": (Net, {"fast_dev_run": 3}),
    "bf16": (Net, {"precision": "bf16-mixed"}),
    "double": (Net, {"precision": "64-true"}),
    "Adam": (lambda: Net(optimizer=torch.optim.Adam), {}),
    "LBFGS": (lambda: Net(optimizer=lbfgs), {}),
    "outputs in a dictionary": (with_methods("Dict", training_step=returns_dict), {}),
    "a step without a loss": (with_methods("Nothing", training_step=returns_nothing_at_times), {}),
    "training_step(batch)": (with_methods("NoIndex", training_step=takes_no_index), {}),
    "optimizer_step": (with_methods("OwnStep", optimizer_step=own_optimizer_step), {}),
    "backward": (with_methods("OwnBackward", backward=own_backward), {}),
    "configure_gradient_clipping": (with_methods("OwnClipping", configure_gradient_clipping=own_clipping), {}),
    "lr_scheduler_step": (
        lambda: with_methods("OwnSchedule", lr_scheduler_step=own_schedule_step)(schedule=step_lr(5), interval="step"),
        {},
    ),
    "on_after_batch_transfer": (with_methods("Moves", on_after_batch_transfer=moves_batches), {}),
    "on_before_batch_transfer": (with_methods("Moves", on_before_batch_transfer=moves_batches), {}),
    "a hook that logs": (with_methods("Logs", on_train_batch_start=logs_in_a_hook), {}),
    "should_stop": (Net, {"callbacks": lambda: [Stop()], "max_epochs": 4}),
    "should_stop, but not yet": (Net, {"callbacks": lambda: [Stop()], "max_epochs": 4, "min_epochs": 2}),
    "early stopping": (
        Net,
        {"callbacks": lambda: [EarlyStopping("val", patience=0, min_delta=0.05)], "max_epochs": 9},
    ),
    "early stopping within an epoch": (
        Net,
        {
            "callbacks": lambda: [EarlyStopping("loss", patience=1, min_delta=0.5, check_on_train_epoch_end=False)],
            "val_check_interval": 2,
            "max_epochs": 9,
        },
    ),
    "hooks that change gradients and rates": (Net, {"callbacks": lambda: [ExchangesGradients()]}),
    "a loader without a length": (Net, {"loaders": lambda: DataLoader(Unsized(), batch_size=SIZE)}),
    "a profiler": (Net, {"profiler": "simple"}),
}


@pytest.mark.parametrize("watched", [False, True], ids=["", "every hook"])
@pytest.mark.parametrize("case", CASES)
def test_comes_to_the_same(case, watched, tmp_path):
    make, settings = CASES[case]
    settings = dict(settings)
    make_callbacks, results, hooks = settings.pop("callbacks", list), [], []
    for ours in (True, False):
        seen = []
        module, callbacks = make(), make_callbacks()
        if watched:
            callbacks.append(every_hook(seen))
            methods = {name: one for name, one in hooks_of_module(seen).items() if name not in vars(type(module))}
            module.__class__ = type(type(module).__name__, (type(module),), methods)
        result, trainer = train(ours, module, callbacks, default_root_dir=tmp_path, **settings)
        results.append(result)
        hooks.append(seen)
        assert not ours or isinstance(trainer.fit_loop.epoch_loop, epoch_loop.EpochLoop)
    for part in results[0]:
        assert same(results[0][part], results[1][part]), part
    names = [[entry[:4] for entry in seen] for seen in hooks]
    assert names[0] == names[1]
    for mine, its in zip(*hooks, strict=True):
        assert same(mine, its), mine[:3]
    assert bool(hooks[0]) == watched


def skips_the_rest(self, batch, batch_idx):
    return -1 if batch_idx == 3 else None


def test_a_module_may_skip_the_rest_of_an_epoch():
    results = [train(ours, with_methods("Skips", on_train_batch_start=skips_the_rest)())[0] for ours in (True, False)]
    assert same(results[0]["weights"], results[1]["weights"]) and same(results[0]["curves"], results[1]["curves"])
    assert same(results[0]["metrics"], results[1]["metrics"]) and same(results[0]["state"], results[1]["state"])


class ByHand(Net):
    """Two optimisers, in turn."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]


def takes_the_iterator(self, dataloader_iter):
    batch, _, _ = next(dataloader_iter)
    return Net.loss(self, batch)


@pytest.mark.parametrize(
    ("make", "settings", "why"),
    [
        (ByHand, {}, "ByHand uses manual optimization"),
        (with_methods("Takes", training_step=takes_the_iterator), {}, "training_step takes dataloader_iter"),
        (Net, {"profiler": "simple"}, "SimpleProfiler measures its parts"),
    ],
)
def test_leaves_to_lightning_what_it_does_not_know_and_says_why(make, settings, why, capsys):
    results = [train(ours, make(), **settings)[0] for ours in (True, False)]
    assert same(results[0], results[1])
    assert capsys.readouterr().out.count(why) == 1


def test_a_changed_function_of_lightning_closes_the_fast_path_with_a_warning_that_names_it(monkeypatch):
    monkeypatch.setitem(vars(replaced.loop), "changed", ["lightning.some.Class.advance"])
    with pytest.warns(UserWarning, match=r"slower training loop: .*lightning.some.Class.advance changed"):
        ours = train(True, Net())[0]
    assert same(ours, train(False, Net())[0])


def test_a_step_makes_no_call_of_lightning_that_does_nothing():
    called, generic = [], {getattr(call, name).__code__ for name in dir(call) if name.startswith("_call_")}

    def spy(frame, event, argument):
        if event == "call" and frame.f_code in generic:
            called.append(frame.f_locals.get("hook_name", ""))

    sys.setprofile(spy)
    try:
        train(True, Net(), max_epochs=1, limit_val_batches=0)
    finally:
        sys.setprofile(None)
    assert "on_train_epoch_start" in called
    assert not {hook for hook in called if "batch" in hook or "step" in hook or "backward" in hook or "zero" in hook}


def test_a_copy_of_a_module_made_within_its_step_logs_for_itself():
    copies = []

    class Copies(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                trainer, self.trainer = self.trainer, None
                copies.append(copy.deepcopy(self))
                self.trainer = trainer
            return super().training_step(batch, batch_idx)

    train(True, Copies(), max_epochs=1)
    assert copies[0].log.__self__ is copies[0] and copies[0].log.__func__ is LightningModule.log


def test_gradients_are_accumulated_as_a_callback_schedules_it():
    settings = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 4})]}
    results = [train(ours, Net(), **settings)[0] for ours in (True, False)]
    assert same(results[0], results[1])


def test_a_checkpoint_of_a_users_callback_holds_the_same(tmp_path):
    found = []
    for ours in (True, False):
        folder = tmp_path / str(ours)
        train(
            ours,
            Net(schedule=step_lr(), interval="step"),
            [ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)],
        )
        found.append({path.name: torch.load(path, weights_only=False) for path in sorted(folder.iterdir())})
    assert list(found[0]) == list(found[1])
    for name in found[0]:
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            assert same(found[0][name][part], found[1][name][part]), (name, part)


def test_what_the_loop_finds_out_it_finds_out_anew_in_each_epoch():
    class Comes(Callback):
        """Another callback joins in the second epoch."""

        def __init__(self):
            self.other = Counts()

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                trainer.callbacks.append(self.other)

    class Counts(Callback):
        count = 0

        def on_train_batch_end(self, *arguments):
            self.count += 1

    comes = Comes()
    _, trainer = train(True, Net(), [comes])
    assert comes.other.count == BATCHES and fit_loop_of(trainer).epoch_loop._fast is None


class LogsInBackward(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: self.log("gradient", gradient * 2))
        return loss


class Shift(Net):
    """A number that the loss is shifted by: its gradient is a view of the gradient of the loss."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.shift = nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.shift.squeeze()


class NoGradients(torch.optim.SGD):
    """An optimiser that leaves it to its closure to want gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


class Deaf(torch.optim.SGD):
    def step(self, closure=None):
        """Forgets the closure."""


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (LogsInBackward, {}),
        (Shift, {"gradient_clip_val": 0.01}),
        (Shift, {"accumulate_grad_batches": 4}),
        (lambda: Net(optimizer=lambda parameters: NoGradients(parameters, lr=0.1)), {}),
    ],
)
def test_what_is_rare_comes_to_the_same(make, settings):
    results = [train(ours, make(), **settings)[0] for ours in (True, False)]
    for part in results[0]:
        assert same(results[0][part], results[1][part]), part


def test_an_optimiser_that_forgets_its_closure_is_an_error():
    for ours in (True, False):
        with pytest.raises(Exception, match="The closure hasn't been executed"):
            train(ours, Net(optimizer=lambda parameters: Deaf(parameters, lr=0.1)))
