"""Functions that the fast path replaces: checked by their sources, and for replacement at run time."""

import contextlib
import functools
import inspect
import io
from types import ModuleType

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core import hooks as core_hooks
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from stock import AtBatch, Counts, Net, are_equal, log_calls, train

from rankzero.training.fast import known_sources, replaced
from rankzero.training.fast.known_sources import KNOWN_SOURCES
from rankzero.training.fast.replaced import (
    LIGHTNING_FUNCTIONS,
    TORCH_FUNCTIONS,
    Functions,
    changed_in_lightning,
    source_digest,
)

PATCHES = {
    "Tensor.backward": (torch.Tensor, "backward"),
    "torch.autograd.backward": (torch.autograd, "backward"),
    "Optimizer.zero_grad": (torch.optim.Optimizer, "zero_grad"),
    "SGD.step": (torch.optim.SGD, "step"),
    "LightningOptimizer.step": (LightningOptimizer, "step"),
    "LightningModule.backward": (LightningModule, "backward"),
    "LightningModule.optimizer_step": (LightningModule, "optimizer_step"),
    "LightningModule.optimizer_zero_grad": (LightningModule, "optimizer_zero_grad"),
    "LightningModule.lr_scheduler_step": (LightningModule, "lr_scheduler_step"),
    "LightningModule.log": (LightningModule, "log"),
    "LightningModule.configure_gradient_clipping": (LightningModule, "configure_gradient_clipping"),
    "LightningModule.on_train_batch_start": (LightningModule, "on_train_batch_start"),
    "Strategy.backward": (Strategy, "backward"),
    "Strategy.optimizer_step": (Strategy, "optimizer_step"),
    "Strategy.batch_to_device": (Strategy, "batch_to_device"),
    "Precision.convert_input": (Precision, "convert_input"),
    "Precision.optimizer_step": (Precision, "optimizer_step"),
    "Precision.backward": (Precision, "backward"),
    "move_data_to_device": (core_hooks, "move_data_to_device"),
    "_call_callback_hooks": (call, "_call_callback_hooks"),
    "_call_strategy_hook": (call, "_call_strategy_hook"),
    "_TrainingEpochLoop.advance": (_TrainingEpochLoop, "advance"),
}


@pytest.mark.parametrize("moment", ["before fit", "in an epoch"])
@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_function_is_called_as_often_as_by_lightning(patch, moment, monkeypatch):
    owner, name = PATCHES[patch]

    def observe(uses_rankzero):
        calls = []
        with monkeypatch.context() as context:

            def install_wrapper(*arguments):
                context.setattr(owner, name, log_calls(getattr(owner, name), calls, patch))

            module = Net()
            if patch == "LightningModule.lr_scheduler_step":
                module = Net(schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3), interval="step")
            if moment == "before fit":
                install_wrapper()
                callbacks = []
            else:
                callbacks = [AtBatch(install_wrapper)]
            result, _ = train(uses_rankzero, module, [*callbacks, Counts()], max_epochs=1, limit_val_batches=0)
        return result, calls

    (actual, calls), (stock, stock_calls) = observe(True), observe(False)
    assert are_equal(actual, stock)
    assert calls == stock_calls and calls


class Owner:
    """Class with functions of every kind."""

    def plain(self):
        return 1

    @property
    def computed(self):
        return 1

    @staticmethod
    def static():
        return 1

    @classmethod
    def of_class(cls):
        return 1

    @torch.no_grad()
    def without_gradients(self):
        return 1

    @contextlib.contextmanager
    def context(
        self,
        argument=(1, 2),
    ):
        yield argument

    async def later(self):
        return 1


NAMES = "plain computed static of_class without_gradients context later"


def test_functions_are_original_until_one_is_replaced():
    functions = Functions({Owner: NAMES})
    assert functions.are_original and functions.replaced_names == []
    for name in NAMES.split():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Owner, name, lambda self: 1)
            assert not functions.are_original
            assert functions.replaced_names == [f"{__name__}.Owner.{name}"]
        assert functions.are_original
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Owner, "plain")
        patch.setattr(Owner, "static", print)
        assert not functions.are_original
        assert functions.replaced_names == [f"{__name__}.Owner.{name}" for name in ("plain", "static")]


def test_replaced_function_of_a_python_module_has_the_modules_name():
    module = ModuleType("a.module")
    module.function = print
    functions = Functions({module: "function"})
    module.function = repr
    assert functions.replaced_names == ["a.module.function"]


def test_function_without_a_known_digest_counts_as_changed(monkeypatch):
    name = f"{__name__}.Owner"
    monkeypatch.setitem(KNOWN_SOURCES, name, {"plain": ("0" * 16, source_digest(Owner.plain)), "static": ("0" * 16,)})
    functions = Functions({Owner: "plain static of_class missing"})
    assert functions.changed == [f"{name}.{function}" for function in ("static", "of_class", "missing")]
    assert functions.digests[name, "missing"] == "missing" and not functions.are_original


def test_digests_do_not_change_when_a_function_is_replaced_later():
    functions = Functions({Owner: "plain"})
    before = functions.digests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Owner, "plain", Owner.static)
        assert functions.digests == before and Functions({Owner: "plain"}).digests != before


def test_digest_of_a_function_without_source_is_missing():
    assert source_digest(len) == source_digest(None) == source_digest(eval("lambda: 1")) == "missing"


def test_digest_covers_wrappers_except_those_of_the_standard_library_and_no_grad():
    def wrapper_of(function):
        @functools.wraps(function)
        def wrapper(*arguments):
            return function(*arguments)

        return wrapper

    plain = Owner.plain
    assert source_digest(wrapper_of(plain)) not in ("missing", source_digest(plain))
    assert source_digest(torch.no_grad()(plain)) == source_digest(plain)
    assert source_digest(contextlib.contextmanager(plain)) == source_digest(plain)


def code_objects():
    """Returns the code objects of all functions that the fast path replaces, and of the functions of `Owner`."""
    functions = [Functions({Owner: NAMES}), *LIGHTNING_FUNCTIONS, *TORCH_FUNCTIONS]
    return [code for group in functions for original in group._originals for code in replaced._code_objects(original)]


def test_sources_are_identical_to_those_from_inspect():
    codes = code_objects()
    assert len(codes) >= 7 + 100
    for code in codes:
        assert replaced._source(code) == inspect.getsource(code).rstrip(), code


def test_installed_lightning_has_only_known_sources():
    assert changed_in_lightning() == []
    assert [name for functions in (*LIGHTNING_FUNCTIONS, *TORCH_FUNCTIONS) for name in functions.replaced_names] == []


def test_changed_functions_of_lightning_are_listed(monkeypatch):
    monkeypatch.setitem(vars(replaced.loop), "changed", ["a"])
    monkeypatch.setitem(vars(replaced.relied_on), "changed", ["b", "c"])
    monkeypatch.setitem(vars(replaced.backward), "changed", ["of torch"])
    assert changed_in_lightning() == ["a", "b", "c"]


def printed_sources():
    out = io.StringIO()
    replaced._print_known_sources(lambda line: print(line, file=out))
    namespace = {}
    exec(out.getvalue(), namespace)
    return namespace


def test_printed_digests_of_known_libraries_equal_known_sources():
    sources = printed_sources()
    assert sources["KNOWN_SOURCES"] == KNOWN_SOURCES and sources["__doc__"] == known_sources.__doc__


def test_digest_of_another_release_is_printed_after_the_known_digests(monkeypatch):
    name = "lightning.pytorch.trainer.call"
    digest = KNOWN_SOURCES[name]["_call_callback_hooks"][0]
    monkeypatch.setitem(KNOWN_SOURCES, name, {"_call_callback_hooks": ("0" * 16,)})
    digests = printed_sources()["KNOWN_SOURCES"][name]
    assert digests["_call_callback_hooks"] == ("0" * 16, digest)
    assert digests.keys() == {"_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook"}
