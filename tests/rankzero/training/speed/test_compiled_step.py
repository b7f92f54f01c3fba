import time
from functools import partial

import numpy
import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero import Trainer
from rankzero.distributed import torch_inside
from rankzero.training.speed import compiled_step
from running import script_process
from stock import SILENT

SAMPLES, BATCH = 200, 32


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch, tmp_path):
    """Traces and differentiates as with Inductor, but runs the graph without generating code."""
    monkeypatch.setattr(torch_inside, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled_step, "compiler_problem", lambda device: None)
    with script_process(tmp_path):
        yield
    torch._dynamo.reset()


class Net(LightningModule):
    """Module with dropout, batch norm, a metric, a schedule and values logged in several ways."""

    def __init__(self, optimizer="SGD"):
        super().__init__()
        self.hidden, self.output = nn.Linear(6, 8, bias=False), nn.Linear(8, 3)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.mean_weight = torchmetrics.MeanMetric()
        self.optimizer = optimizer

    def outputs(self, batch):
        return self.output(self.dropout(torch.relu(self.norm(self.hidden(batch[0])))))

    def training_step(self, batch, batch_idx):
        outputs = self.outputs(batch)
        loss = nn.functional.cross_entropy(outputs, batch[1])
        accuracy = self.accuracy(outputs, batch[1])
        self.mean_weight(self.output.weight)  # which the graph updates afterwards
        self.log_dict({"accuracy": accuracy, "weight": self.mean_weight})
        self.log_dict({"loss": loss, "index": batch_idx * 1.0}, on_step=True, on_epoch=True)
        return {"loss": loss, "outputs": outputs, "accuracy": accuracy}

    def configure_optimizers(self):
        settings = {"SGD": {"momentum": 0.9, "nesterov": True}, "AdamW": {"amsgrad": True}}.get(self.optimizer, {})
        optimizer = getattr(torch.optim, self.optimizer.split()[-1])(self.parameters(), lr=0.02, **settings)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rows(Callback):
    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rows.append((batch_idx, trainer.global_step, sorted(outputs), metrics))
        for value in outputs.values():
            value.detach().zero_()  # must not change what is logged


def loader():
    generator = torch.Generator().manual_seed(0)
    inputs, classes = torch.randn(SAMPLES, 6, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    return DataLoader(TensorDataset(inputs, classes), BATCH, shuffle=True)


def fit(how, make=Net, epochs=3, **settings):
    torch.manual_seed(0)
    module, rows = make(), Rows()
    callbacks = [rows, *settings.pop("callbacks", [])]
    trainer = Trainer(max_epochs=epochs, compile=how, seed=1, callbacks=callbacks, **{**SILENT, **settings})
    trainer.fit(module, loader())
    return module, trainer, rows.rows


def graph_of(trainer):
    return trainer.fit_loop.epoch_loop.compiled_step.graph


def assert_equal(expected, found, tolerance=1e-5):
    for name, value in expected[0].state_dict().items():
        torch.testing.assert_close(found[0].state_dict()[name], value, rtol=tolerance, atol=tolerance)
    assert len(expected[2]) == len(found[2])
    for (*position, metrics), (*found_position, found_metrics) in zip(expected[2], found[2], strict=True):
        assert position == found_position
        assert metrics == pytest.approx(found_metrics, abs=tolerance)


DOUBLES = LambdaCallback(on_after_backward=lambda trainer, module: module.output.bias.grad.mul_(2))


@pytest.mark.parametrize(
    ("optimizer", "settings", "updates"),
    [
        *(("SGD", {}, True), ("AdamW", {}, True), ("Adam", {"limit_train_batches": 3}, True), ("RMSprop", {}, False)),
        ("SGD", {"accumulate_grad_batches": 3}, False),
        ("AdamW", {"gradient_clip_val": 0.1}, False),
        ("SGD", {"callbacks": [DOUBLES]}, False),
        ("Adam", {"precision": "bf16-mixed"}, True),
        ("SGD", {"max_device_batch_size": 16, "global_batch_size": 64}, False),
    ],
)
def test_compiled_steps_train_and_log_as_steps_without_graph(optimizer, settings, updates, capsys):
    expected, found = (fit(how, partial(Net, optimizer), **settings) for how in ("off", "step"))
    assert_equal(expected, found, 1e-5 if "precision" not in settings else 0.05)
    assert graph_of(found[1]).updates == updates
    assert graph_of(found[1]).function.compilations <= 2
    output = capsys.readouterr().out
    assert "compiled the training step in" in output and "not compiling" not in output


def test_a_resumed_run_equals_an_uninterrupted_run_and_its_checkpoint_loads_without_graph(tmp_path):
    settings = {"enable_checkpointing": True, "root": str(tmp_path), "logger": False}
    whole = fit("step", epochs=4, name="whole", **settings)
    fit("step", epochs=2, name="parts", **settings)
    parts = fit("step", epochs=4, name="parts", **settings)
    assert_equal(whole[:2] + (whole[2][-14:],), parts)
    loaded = Net()
    Trainer(max_epochs=4, compile="off", seed=1, name="parts", **{**SILENT, **settings}).fit(loaded, loader())
    assert not any("_orig_mod" in name for name in loaded.state_dict())
    assert_equal((loaded, None, []), (parts[0], None, []), 0)


class LateHook(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 5:
            module.on_before_optimizer_step = lambda optimizer: module.output.bias.grad.zero_()


def in_second_epoch(change):
    """Returns a change at the start of the second epoch only."""
    return lambda trainer, module: trainer.current_epoch == 1 and change(trainer, module)


def set_momentum(trainer, module):
    trainer.optimizers[0].param_groups[0]["momentum"] = 0.9 - 0.1 * trainer.current_epoch


def replace_layer(trainer, module):
    module.output = nn.Linear(8, 3)
    trainer.optimizers[0].add_param_group({"params": module.output.parameters()})


CHANGES_OF_ONE_EPOCH = {
    "momentum": lambda trainer, _: trainer.optimizers[0].param_groups[0].update(momentum=0.9),
    "clipping": lambda trainer, _: setattr(trainer, "gradient_clip_val", 0.01),
    "hook of a layer": lambda _, module: module.hidden.register_forward_hook(lambda *values: values[2] / 2),
    "hook of a parameter": lambda _, module: module.output.bias.register_hook(lambda gradient: gradient * 2),
    "layer": replace_layer,
}
CHANGES = {name: in_second_epoch(change) for name, change in CHANGES_OF_ONE_EPOCH.items()}
CHANGES["momentum of each epoch"] = set_momentum
CHANGES["unfreezing"] = lambda trainer, module: module.hidden.requires_grad_(trainer.current_epoch >= 1)


@pytest.mark.parametrize("change", ["late hook", *CHANGES])
def test_changes_by_callbacks_take_effect(change):
    callback = LambdaCallback(on_train_epoch_start=CHANGES[change]) if change in CHANGES else LateHook()
    make = partial(Net, "plain SGD" if change == "momentum" else "SGD")
    assert_equal(*(fit(how, make, callbacks=[callback]) for how in ("off", "step")))


class ParameterOutside(Net):
    def __init__(self):
        super().__init__()
        self.others = [nn.Linear(3, 3)]

    def outputs(self, batch):
        return self.others[0](super().outputs(batch))

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), *self.others[0].parameters()], lr=0.02)


def test_parameters_that_the_module_has_not_registered_are_trained(capsys):
    expected, found = fit("off", ParameterOutside), fit("step", ParameterOutside)
    assert_equal(expected, found)
    assert torch.equal(expected[0].others[0].weight, found[0].others[0].weight)
    assert "the optimizer has parameters that ParameterOutside has not" in capsys.readouterr().out


measure = nn.functional.cross_entropy


class OtherLoss(Callback):
    def on_train_epoch_end(self, trainer, module):
        global measure
        measure = nn.functional.multi_margin_loss


class UsesGlobal(Net):
    def training_step(self, batch, batch_idx):
        return measure(self.outputs(batch), batch[1])


def test_a_replaced_function_of_the_module_s_file_takes_effect(monkeypatch):
    monkeypatch.setitem(globals(), "measure", measure)
    expected = fit("off", UsesGlobal, callbacks=[OtherLoss()])
    monkeypatch.setitem(globals(), "measure", nn.functional.cross_entropy)
    assert_equal(expected, fit("step", UsesGlobal, callbacks=[OtherLoss()]))
    assert measure is nn.functional.multi_margin_loss


def test_steps_of_one_size_run_as_a_graph_if_other_sizes_cannot_be_compiled(monkeypatch, capsys):
    call = torch_inside.GraphFunction.__call__

    def fails_for_other_sizes(self, batch, *arguments):
        if len(batch[0]) != BATCH:
            raise torch_inside.CannotCompileError("fails")
        return call(self, batch, *arguments)

    expected = fit("off")
    monkeypatch.setattr(torch_inside.GraphFunction, "__call__", fails_for_other_sizes)
    found = fit("step")
    assert_equal(expected, found)
    assert found[1].fit_loop.epoch_loop.compiled_step.reason is None
    notices = [line for line in capsys.readouterr().out.splitlines() if "not compiling" in line]
    assert notices == ['rankzero: not compiling steps with other sizes of batches (compile="step"): fails']


class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.mean, self.count, self.losses = torchmetrics.MeanMetric(), 0, []
        self.prepare()

    def prepare(self):
        pass

    def loss(self, batch):
        return self.layer(batch[0]).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def plain(training_step=Plain.training_step, **methods):
    return type("Own", (Plain,), {"training_step": training_step, **methods})


def print_loss(self, batch, batch_idx):
    loss = self.loss(batch)
    print("loss", loss)
    return loss


def store(self, batch, batch_idx):
    loss = self.loss(batch)
    self.losses.append(loss.item())
    return loss


def branch(self, batch, batch_idx):
    loss = self.loss(batch)
    if loss > 0.5:
        loss = loss * 2
    return loss


def draw_with_numpy(self, batch, batch_idx):
    numpy.random.seed(batch_idx)
    return self.loss(batch) * numpy.random.rand()


def count(self, batch, batch_idx):
    self.count += 1
    return self.loss(batch) * self.count


def take_time(self, batch, batch_idx):
    self.started = time.perf_counter()
    return self.loss(batch)


def compute_mean(self, batch, batch_idx):
    loss = self.loss(batch)
    self.mean.update(loss)
    self.log("mean", self.mean.compute())
    return loss


class TwoOptimizers(Plain):
    def prepare(self):
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=0.05) for parameter in self.parameters()]


class Overrides(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class StoresResults(Plain):
    def prepare(self):
        self.results, self.sums = [], []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.results.append(self.mean(loss))
        return loss

    def on_train_batch_end(self, *arguments):
        self.sums.append(sum(map(float, self.results)))
        self.log("sum", self.sums[-1])


class HasSparseGradients(Plain):
    def prepare(self):
        self.embedding = nn.Embedding(3, 6, sparse=True)

    def training_step(self, batch, batch_idx):
        return self.layer(self.embedding(batch[1])).square().mean()


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (plain(print_loss), 'print("loss", loss) (Failed to trace builtin operator)'),
        (plain(store), "self.losses.append(loss.item()) (len(self.module.losses) == 2 does not hold in every step)"),
        (plain(branch), "if loss > 0.5: (Data-dependent branching)"),
        (plain(draw_with_numpy), "numpy.random"),
        (plain(count), "self.count += 1 (self.module.count == 2 does not hold in every step)"),
        (plain(take_time), "self.started = time.perf_counter() (Call to a time function)"),
        (plain(prepare=lambda self: self.layer.weight.register_hook(abs)), "layer.weight has a gradient hook"),
        (plain(prepare=lambda self: self.layer.register_full_backward_hook(lambda *_: None)), "backwards hooks"),
        (TwoOptimizers, "TwoOptimizers uses manual optimization"),
        (Overrides, "Overrides or a callback overrides part of the optimizer step"),
        (plain(compute_mean), 'self.log("mean", self.mean.compute())'),
        (StoresResults, "training_step stores the result of a metric as results"),
        (plain(lambda self, batch, i: self.loss(batch) if i % 3 else None), "not compiling further training steps"),
        (HasSparseGradients, "not compiling training steps"),
    ],
)
def test_a_step_that_cannot_be_compiled_runs_without_graph_and_its_line_is_named(make, line, capfd):
    expected = fit("off", make, epochs=2)
    capfd.readouterr()
    found = fit("step", make, epochs=2)
    output = capfd.readouterr()
    assert_equal(expected, found)
    [notice] = [text for text in output.out.splitlines() if "not compiling" in text]
    assert line in notice
    assert "test_compiled_step.py:" in notice or " (" not in line
    assert "Traceback" not in output.out + output.err


def test_the_trainer_s_counters_may_be_read(capsys):
    def read_counters(self, batch, batch_idx):
        return self.loss(batch) * (1 + self.global_step) / (2 + self.current_epoch + self.trainer.global_step)

    expected, found = (fit(how, plain(read_counters)) for how in ("off", "step"))
    assert_equal(expected, found)
    assert graph_of(found[1]).function.compilations == 2
    assert "not compiling" not in capsys.readouterr().out


class OneCycle(Plain):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(("make", "step", "graphs"), [(OneCycle, 100, 1), (Plain, 0, 1), (Plain, 5, 2)])
def test_a_schedule_of_other_settings_than_the_rate_leaves_the_update_out_of_the_graph(make, step, graphs):
    def decay(trainer, *_):
        trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.01 * max(0, trainer.global_step - step)

    callbacks = [LambdaCallback(on_train_batch_start=decay)]
    expected, found = (fit(how, make, callbacks=callbacks) for how in ("off", "step"))
    assert_equal(expected, found)
    compiled = found[1].fit_loop.epoch_loop.compiled_step
    assert (compiled._graphs, graph_of(found[1]).updates, compiled.reason) == (graphs, False, None)


def test_an_error_of_the_module_is_raised_as_without_graph():
    def fail(self, batch, batch_idx):
        if batch_idx == 3:
            raise ValueError("my error")
        return self.loss(batch)

    with pytest.raises(ValueError, match="my error"):
        fit("step", plain(fail))


def test_what_the_machine_or_torch_lacks_is_reported_before_anything_is_compiled(monkeypatch, capsys):
    monkeypatch.setattr(compiled_step, "compiler_problem", lambda device: "no C++ compiler found")
    _, trainer, _ = fit("step", epochs=1)
    assert graph_of(trainer) is None
    output = capsys.readouterr().out
    assert 'not compiling training steps (compile="step"): no C++ compiler found' in output
    assert "compiling the training step (" not in output


def test_compile_model_compiles_as_lightning_does_and_leaves_the_module_as_it_was(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    expected, found = (fit(how, epochs=1) for how in ("off", "model"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert_equal(expected, found)
    assert found[0]._compiler_ctx is None
