import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from torch import nn

from stock import BATCHES, Net, assert_equals_stock, assert_same_training, observe, observe_error, train, with_methods


def return_dict(self, batch, batch_idx):
    return {"loss": Net.training_step(self, batch, batch_idx), "more": batch_idx}


def return_no_loss_in_some_steps(self, batch, batch_idx):
    loss = Net.training_step(self, batch, batch_idx)
    return None if batch_idx % 3 == 2 else loss


def custom_optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
    if batch_idx % 2 == 0:
        optimizer.step(closure=optimizer_closure)
    else:
        optimizer_closure()


def custom_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
    self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class ChangesGradients(Callback):
    def on_after_backward(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.grad.mul_(0.5)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        optimizer.param_groups[0]["lr"] = 0.01 * (trainer.global_step + 1)


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


class ClosureLast(torch.optim.SGD):
    def step(self, scale=None, closure=None):
        assert scale is None
        return super().step(closure)


class CallsClosureTwice(torch.optim.SGD):
    """Optimizer that calls its closure twice, the second time without gradients."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            assert closure().requires_grad is False
        return loss


def with_optimizer(kind, make_module=Net, **settings):
    return lambda: make_module(optimizer=lambda parameters: kind(parameters, lr=0.1, **settings))


CASES = {
    "gradient accumulation, and a rest": (Net, {"accumulate_grad_batches": 2, "limit_train_batches": 5}),
    "Adam": (with_optimizer(torch.optim.Adam), {}),
    "LBFGS": (with_optimizer(torch.optim.LBFGS, max_iter=3), {}),
    "outputs in a dictionary": (with_methods("Dict", training_step=return_dict), {}),
    "a step without a loss": (with_methods("Nothing", training_step=return_no_loss_in_some_steps), {}),
    "training_step(batch)": (
        with_methods("NoIndex", training_step=lambda self, batch: Net.training_step(self, batch, 1)),
        {},
    ),
    "optimizer_step": (with_methods("OwnStep", optimizer_step=custom_optimizer_step), {}),
    "backward": (with_methods("OwnBackward", backward=lambda self, loss: (loss * 0.5).backward()), {}),
    "configure_gradient_clipping": (with_methods("OwnClipping", configure_gradient_clipping=custom_clipping), {}),
    "hooks that change gradients and rates": (Net, {"make_callbacks": lambda: [ChangesGradients()]}),
    "a gradient that is a view, clipped": (Shift, {"gradient_clip_val": 0.01}),
    "a gradient that is a view, accumulated": (Shift, {"accumulate_grad_batches": 4}),
    "an optimizer without gradients": (with_optimizer(NoGradients), {}),
    "an optimizer with another first argument": (with_optimizer(ClosureLast), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_identical_to_stock_lightning(case):
    make_module, settings = CASES[case]
    assert_same_training(make_module, **settings)


WRONG_STEPS = {
    "a dictionary without a loss": lambda self, batch, batch_idx: {"more": self.loss(batch)},
    "a dictionary with None": lambda self, batch, batch_idx: {"loss": None},
    "text": lambda self, batch, batch_idx: "loss",
    "a number": lambda self, batch, batch_idx: 1.0,
    "a loss without a graph": lambda self, batch, batch_idx: self.loss(batch).detach(),
    "two losses": lambda self, batch, batch_idx: self.loss(batch) * torch.ones(2),
    "an error": lambda self, batch, batch_idx: {}["the user's own"],
}
WRONG_MODULES = {name: with_methods("Fails", training_step=step) for name, step in WRONG_STEPS.items()}
WRONG_MODULES["an ignored closure"] = with_optimizer(
    type("Ignores", (torch.optim.SGD,), {"step": lambda self, closure: None})
)


@pytest.mark.parametrize("case", WRONG_MODULES)
def test_training_step_errors_equal_lightnings(case):
    error = assert_equals_stock(observe_error, WRONG_MODULES[case])
    assert observe_error(True, WRONG_MODULES[case], lambda: [Callback()]) == error


@pytest.mark.filterwarnings("ignore")
def test_steps_without_a_loss_warn_and_do_not_change_the_weights():
    def training_step(self, batch, batch_idx):
        self.loss(batch)

    make_module = with_methods("Nothing", training_step=training_step)
    assert_equals_stock(observe, make_module)
    Closure.warning_cache.clear()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):  # stock Lightning does not train again
        actual = assert_equals_stock(observe, make_module)
    assert torch.equal(actual["weights"]["net.0.weight"], make_module().net[0].weight)


class RecordsHookName(Net):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self._current_fx_name, torch.is_grad_enabled(), self.training))
        return super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.seen.append((self._current_fx_name, torch.is_grad_enabled(), gradient_clip_val))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, CallsClosureTwice])
def test_current_hook_name_and_grad_mode_equal_lightnings(optimizer):
    make_module = with_optimizer(optimizer, RecordsHookName)
    assert len(assert_equals_stock(observe, make_module, max_epochs=1, gradient_clip_val=0.5)["seen"][0]) >= 2 * BATCHES


def test_steps_do_not_run_lightnings_optimization(monkeypatch):
    """Otherwise the comparisons above would compare Lightning's step with itself."""
    monkeypatch.setattr(_AutomaticOptimization, "run", None)
    _, trainer = train(True, Net(), max_epochs=1, accumulate_grad_batches=2)
    assert trainer.global_step == BATCHES // 2 and trainer.fit_loop.epoch_loop._training_loop is None


def test_step_keeps_no_reference_to_batch_or_output():
    references = []

    def record(trainer, *arguments):
        loop = trainer.fit_loop.epoch_loop._training_loop
        references.append((loop._batch, loop._outputs))

    train(True, Net(), [LambdaCallback(on_train_batch_end=record)], max_epochs=1)
    assert references == [((), None)] * BATCHES
