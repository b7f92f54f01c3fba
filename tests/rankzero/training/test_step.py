"""The training step: forward pass, backward pass and optimizer step, compared with Lightning's optimization."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loops.optimization.automatic import Closure
from stock import (
    BATCHES,
    CHANGE_HOOKS,
    Net,
    are_equal,
    assert_same_after_change,
    assert_same_training,
    train,
    with_methods,
)
from torch import nn

from rankzero.training.step import OptimizerStep


def return_dict(self, batch, batch_idx):
    return {"loss": Net.training_step(self, batch, batch_idx), "more": batch_idx}


def return_no_loss_in_some_steps(self, batch, batch_idx):
    loss = Net.training_step(self, batch, batch_idx)
    return None if batch_idx % 3 == 2 else loss


def train_without_index(self, batch):
    return Net.training_step(self, batch, 1)


def custom_optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
    if batch_idx % 2 == 0:
        optimizer.step(closure=optimizer_closure)
    else:
        optimizer_closure()


def custom_backward(self, loss):
    (loss * 0.5).backward()


def custom_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
    self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class ChangesGradients(Callback):
    def on_after_backward(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.grad.mul_(0.5)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        optimizer.param_groups[0]["lr"] = 0.01 * (trainer.global_step + 1)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


CASES = {
    "gradient accumulation": (Net, {"accumulate_grad_batches": 2}),
    "gradient accumulation, and a rest": (Net, {"accumulate_grad_batches": 2, "limit_train_batches": 5}),
    "clipping by norm": (Net, {"gradient_clip_val": 0.01}),
    "clipping by value": (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16": (Net, {"precision": "bf16-mixed"}),
    "double": (Net, {"precision": "64-true"}),
    "Adam": (lambda: Net(optimizer=torch.optim.Adam), {}),
    "LBFGS": (lambda: Net(optimizer=lbfgs), {}),
    "outputs in a dictionary": (with_methods("Dict", training_step=return_dict), {}),
    "a step without a loss": (with_methods("Nothing", training_step=return_no_loss_in_some_steps), {}),
    "training_step(batch)": (with_methods("NoIndex", training_step=train_without_index), {}),
    "optimizer_step": (with_methods("OwnStep", optimizer_step=custom_optimizer_step), {}),
    "backward": (with_methods("OwnBackward", backward=custom_backward), {}),
    "configure_gradient_clipping": (with_methods("OwnClipping", configure_gradient_clipping=custom_clipping), {}),
    "hooks that change gradients and rates": (Net, {"callbacks": lambda: [ChangesGradients()]}),
}


@pytest.mark.parametrize("has_every_hook", [False, True], ids=["", "every hook"])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_identical_to_stock_lightning(case, has_every_hook, tmp_path):
    assert_same_training(*CASES[case], has_every_hook, tmp_path)


class Shift(Net):
    """Module that adds a parameter to the loss; the parameter's gradient is a view of the loss's gradient."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.shift = nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.shift.squeeze()


class NoGradients(torch.optim.SGD):
    """Optimizer whose `step` disables gradients, so that the closure must enable them."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


class IgnoresClosure(torch.optim.SGD):
    def step(self, closure=None):
        """Does not call the closure."""


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Shift, {"gradient_clip_val": 0.01}),
        (Shift, {"accumulate_grad_batches": 4}),
        (lambda: Net(optimizer=lambda parameters: NoGradients(parameters, lr=0.1)), {}),
    ],
)
def test_unusual_steps_are_identical_to_stock_lightning(make, settings):
    results = [train(uses_rankzero, make(), **settings)[0] for uses_rankzero in (True, False)]
    for key in results[0]:
        assert are_equal(results[0][key], results[1][key]), key


def test_optimizer_that_does_not_call_its_closure_raises_an_error():
    for uses_rankzero in (True, False):
        with pytest.raises(Exception, match="The closure hasn't been executed"):
            train(uses_rankzero, Net(optimizer=lambda parameters: IgnoresClosure(parameters, lr=0.1)))


def replace_training_step(callback, trainer, module):
    module.training_step = lambda batch, batch_idx: module.loss(batch) * 2


def replace_training_step_without_index(callback, trainer, module):
    module.training_step = lambda batch: module.loss(batch) * 3


@pytest.mark.parametrize("hook", CHANGE_HOOKS)
@pytest.mark.parametrize("change", [replace_training_step, replace_training_step_without_index])
def test_replaced_training_step_takes_effect_immediately(change, hook):
    assert_same_after_change(change, hook)


def return_nothing(self, batch, batch_idx):
    self.loss(batch)


def return_dict_without_loss(self, batch, batch_idx):
    return {"more": self.loss(batch)}


def return_text(self, batch, batch_idx):
    return "loss"


def return_number(self, batch, batch_idx):
    return 1.0


def return_loss_without_graph(self, batch, batch_idx):
    return self.loss(batch).detach()


def return_two_losses(self, batch, batch_idx):
    return self.loss(batch) * torch.ones(2)


def return_dict_with_none_as_loss(self, batch, batch_idx):
    return {"loss": None}


def fail(self, batch, batch_idx):
    raise LookupError("the user's own")


@pytest.mark.parametrize(
    "method",
    [
        return_dict_without_loss,
        return_dict_with_none_as_loss,
        return_text,
        return_number,
        return_loss_without_graph,
        return_two_losses,
        fail,
    ],
)
@pytest.mark.parametrize("has_callback", [False, True])
def test_training_step_errors_equal_lightnings(method, has_callback):
    def observe(uses_rankzero):
        module, callbacks = with_methods("Fails", training_step=method)(), [Callback()] * has_callback
        with pytest.raises(Exception) as error:
            train(uses_rankzero, module, callbacks)
        return type(error.value), str(error.value), module._current_fx_name

    assert observe(True) == observe(False)


@pytest.mark.filterwarnings("ignore")
def test_steps_without_a_loss_do_not_change_the_weights():
    module = with_methods("Nothing", training_step=return_nothing)
    actual, stock = (train(uses_rankzero, module())[0] for uses_rankzero in (True, False))
    assert are_equal(actual, stock) and torch.equal(actual["weights"]["net.0.weight"], module().net[0].weight)


def test_step_without_a_loss_warns():
    Closure.warning_cache.clear()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        train(True, with_methods("Nothing", training_step=return_nothing)(), max_epochs=1)


class OptimizerWithoutGradients(torch.optim.SGD):
    """Optimizer that calls its closure twice, the second time without gradients."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            assert closure().requires_grad is False
        return loss


class RecordsHookName(Net):
    """Records the module's current hook name, and whether gradients are enabled."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self._current_fx_name, torch.is_grad_enabled(), self.training))
        return super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.seen.append((self._current_fx_name, torch.is_grad_enabled(), gradient_clip_val))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, OptimizerWithoutGradients])
def test_current_hook_name_and_grad_mode_equal_lightnings(optimizer):
    def observe(uses_rankzero):
        module = RecordsHookName(optimizer=lambda parameters: optimizer(parameters, lr=0.1))
        result, _ = train(uses_rankzero, module, max_epochs=1, gradient_clip_val=0.5)
        return result, module.seen

    actual, stock = observe(True), observe(False)
    assert are_equal(actual[0], stock[0]) and actual[1] == stock[1] and len(actual[1]) >= 2 * BATCHES


def test_fast_step_runs_for_every_batch(monkeypatch):
    """Otherwise the comparisons above would compare Lightning's step with itself."""
    calls, run = [], OptimizerStep.run
    monkeypatch.setattr(OptimizerStep, "run", lambda self, *arguments: calls.append(1) or run(self, *arguments))
    train(True, Net(), max_epochs=1, accumulate_grad_batches=2)
    assert len(calls) == BATCHES


def test_step_keeps_no_reference_to_batch_or_output():
    references = []

    class RecordsReferences(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            step = trainer.fit_loop.epoch_loop._fast_epoch.step
            references.append((step._batch, step._output, step._result))

    train(True, Net(), [RecordsReferences()], max_epochs=1)
    assert references == [((), None, None)] * BATCHES
