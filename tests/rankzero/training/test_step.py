"""The training step: forward pass, backward pass and optimizer step, compared with Lightning's optimization."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loops.optimization.automatic import Closure
from stock import BATCHES, CHANGED_IN, Net, assert_same_after_change, assert_same_training, same, train, with_methods
from torch import nn

from rankzero.training.step import OptimizerStep


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


class ExchangesGradients(Callback):
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
    "outputs in a dictionary": (with_methods("Dict", training_step=returns_dict), {}),
    "a step without a loss": (with_methods("Nothing", training_step=returns_nothing_at_times), {}),
    "training_step(batch)": (with_methods("NoIndex", training_step=takes_no_index), {}),
    "optimizer_step": (with_methods("OwnStep", optimizer_step=own_optimizer_step), {}),
    "backward": (with_methods("OwnBackward", backward=own_backward), {}),
    "configure_gradient_clipping": (with_methods("OwnClipping", configure_gradient_clipping=own_clipping), {}),
    "hooks that change gradients and rates": (Net, {"callbacks": lambda: [ExchangesGradients()]}),
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


class Deaf(torch.optim.SGD):
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
    results = [train(ours, make(), **settings)[0] for ours in (True, False)]
    for part in results[0]:
        assert same(results[0][part], results[1][part]), part


def test_optimizer_that_does_not_call_its_closure_raises_an_error():
    for ours in (True, False):
        with pytest.raises(Exception, match="The closure hasn't been executed"):
            train(ours, Net(optimizer=lambda parameters: Deaf(parameters, lr=0.1)))


def exchange_training_step(callback, trainer, module):
    module.training_step = lambda batch, batch_idx: module.loss(batch) * 2


def exchange_training_step_for_one_without_index(callback, trainer, module):
    module.training_step = lambda batch: module.loss(batch) * 3


@pytest.mark.parametrize("hook", CHANGED_IN)
@pytest.mark.parametrize("change", [exchange_training_step, exchange_training_step_for_one_without_index])
def test_replaced_training_step_takes_effect_immediately(change, hook):
    assert_same_after_change(change, hook)


def gives_nothing(self, batch, batch_idx):
    self.loss(batch)


def gives_a_dict_without_a_loss(self, batch, batch_idx):
    return {"more": self.loss(batch)}


def gives_text(self, batch, batch_idx):
    return "loss"


def gives_a_number(self, batch, batch_idx):
    return 1.0


def gives_a_loss_without_a_graph(self, batch, batch_idx):
    return self.loss(batch).detach()


def gives_two_losses(self, batch, batch_idx):
    return self.loss(batch) * torch.ones(2)


def gives_a_dict_of_no_loss(self, batch, batch_idx):
    return {"loss": None}


def fails(self, batch, batch_idx):
    raise LookupError("the user's own")


@pytest.mark.parametrize(
    "method",
    [
        gives_a_dict_without_a_loss,
        gives_a_dict_of_no_loss,
        gives_text,
        gives_a_number,
        gives_a_loss_without_a_graph,
        gives_two_losses,
        fails,
    ],
)
@pytest.mark.parametrize("has_callback", [False, True])
def test_training_step_errors_equal_lightnings(method, has_callback):
    def observe(ours):
        module, callbacks = with_methods("Fails", training_step=method)(), [Callback()] * has_callback
        with pytest.raises(Exception) as error:
            train(ours, module, callbacks)
        return type(error.value), str(error.value), module._current_fx_name

    assert observe(True) == observe(False)


@pytest.mark.filterwarnings("ignore")
def test_steps_without_a_loss_do_not_change_the_weights():
    module = with_methods("Nothing", training_step=gives_nothing)
    ours, stock = (train(way, module())[0] for way in (True, False))
    assert same(ours, stock) and torch.equal(ours["weights"]["net.0.weight"], module().net[0].weight)


def test_step_without_a_loss_warns():
    Closure.warning_cache.clear()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        train(True, with_methods("Nothing", training_step=gives_nothing)(), max_epochs=1)


class OptimizerWithoutGradients(torch.optim.SGD):
    """Optimizer that calls its closure twice, the second time without gradients."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            assert closure().requires_grad is False
        return loss


class Observes(Net):
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
    def observe(ours):
        module = Observes(optimizer=lambda parameters: optimizer(parameters, lr=0.1))
        result, _ = train(ours, module, max_epochs=1, gradient_clip_val=0.5)
        return result, module.seen

    ours, stock = observe(True), observe(False)
    assert same(ours[0], stock[0]) and ours[1] == stock[1] and len(ours[1]) >= 2 * BATCHES


def test_fast_step_runs_for_every_batch(monkeypatch):
    """Otherwise the comparisons above would compare Lightning's step with itself."""
    taken, run = [], OptimizerStep.run
    monkeypatch.setattr(OptimizerStep, "run", lambda self, *arguments: taken.append(1) or run(self, *arguments))
    train(True, Net(), max_epochs=1, accumulate_grad_batches=2)
    assert len(taken) == BATCHES


def test_step_keeps_no_reference_to_batch_or_output():
    held = []

    class Holds(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            step = trainer.fit_loop.epoch_loop._fast.step
            held.append((step._batch, step._output, step._result))

    train(True, Net(), [Holds()], max_epochs=1)
    assert held == [((), None, None)] * BATCHES
