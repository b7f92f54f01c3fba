import contextlib
import functools
import inspect
import io
from itertools import product
from types import ModuleType

import pytest
import torch

from rankzero.training.fast import known_sources, replaced
from rankzero.training.fast.known_sources import KNOWN_SOURCES
from rankzero.training.fast.replaced import Functions, changed_in_lightning, source_digest
from stock import AtBatch, Counts, Net, differences, log_calls, observe, of_stock, owner_of

CORE, STRATEGY = "lightning.pytorch.core", "lightning.pytorch.strategies.Strategy"
MODULE, PRECISION = f"{CORE}.LightningModule", "lightning.pytorch.plugins.precision.Precision"
SCHEDULED = f"{MODULE}.lr_scheduler_step"
"""This function is called only with a schedule; a schedule hides later replacements of the optimizer's `step`."""
PATCHES = [
    *("torch.Tensor.backward", "torch.autograd.backward", "torch.optim.Optimizer.zero_grad", "torch.optim.SGD.step"),
    *(f"{CORE}.optimizer.LightningOptimizer.step", f"{CORE}.hooks.move_data_to_device"),
    *(f"{MODULE}.{name}" for name in ("backward", "optimizer_step", "optimizer_zero_grad", "log")),
    *(f"{MODULE}.{name}" for name in ("configure_gradient_clipping", "on_train_batch_start")),
    *(f"{STRATEGY}.{name}" for name in ("backward", "optimizer_step", "batch_to_device")),
    *(f"{PRECISION}.{name}" for name in ("convert_input", "optimizer_step", "backward")),
    *(f"lightning.pytorch.trainer.call.{name}" for name in ("_call_callback_hooks", "_call_strategy_hook")),
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop.advance",
]
INSTANCES = [
    *(f"trainer.strategy.{name}" for name in ("backward", "training_step", "optimizer_step", "batch_to_device")),
    *(f"trainer.precision_plugin.{name}" for name in ("convert_input", "backward", "optimizer_step")),
    "trainer.precision_plugin.train_step_context",
    *(f"trainer.lightning_module.{name}" for name in ("log", "backward", "transfer_batch_to_device")),
    *("trainer.lightning_module.optimizers().step", "trainer.optimizers[0].step", "trainer.optimizers[0].zero_grad"),
    *("trainer.profiler.profile", "trainer._logger_connector.log_metrics"),
]


def observe_wrapped(uses_rankzero, hook, *names):
    """Trains with functions that are wrapped before the fit or in a hook; returns results and names of all calls."""
    calls, schedule = [], functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    make_module = functools.partial(Net, schedule=schedule if SCHEDULED in names else None, interval="step")
    with pytest.MonkeyPatch.context() as context:

        def install_wrappers(callback=None, trainer=None, module=None):
            for name in names:
                owner, function = owner_of(name, trainer)
                context.setattr(owner, function, log_calls(getattr(owner, function), calls, name))

        callbacks = [Counts()]
        if hook:
            callbacks.insert(0, AtBatch(install_wrappers, hook))
        else:
            install_wrappers()
        result = observe(uses_rankzero, make_module, lambda: callbacks, max_epochs=1, limit_val_batches=0)
    return result, calls


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        *product([*PATCHES, SCHEDULED], [None, "on_train_batch_end"]),
        *product(INSTANCES, ["on_train_start", "on_train_batch_end"]),
    ],
)
def test_a_wrapped_function_is_called_as_often_as_by_lightning(name, hook):
    actual, calls = observe_wrapped(True, hook, name)
    names = next(names for names in (PATCHES, INSTANCES, [SCHEDULED]) if name in names)
    stock, stock_calls = of_stock(observe_wrapped, hook, *names)
    expected = stock_calls.count(name)
    assert differences(actual, stock) == [] and expected
    assert len(calls) == expected or (name == "trainer.profiler.profile" and len(calls) >= expected)


class Owner:
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


REPLACED = (*replaced.LIGHTNING_FUNCTIONS, *replaced.TORCH_FUNCTIONS)
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
    assert source_digest(len) == source_digest(None) == source_digest(eval("lambda: 1")) == "missing"


def test_sources_are_identical_to_those_from_inspect():
    functions = [Functions({Owner: NAMES}), *REPLACED]
    codes = [code for group in functions for original in group._originals for code in replaced._code_objects(original)]
    assert len(codes) >= 7 + 100
    for code in codes:
        assert replaced._source(code) == inspect.getsource(code).rstrip(), code


def test_installed_lightning_has_only_known_sources_and_changed_functions_are_listed(monkeypatch):
    assert changed_in_lightning() == []
    assert [name for functions in REPLACED for name in functions.replaced_names] == []
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


def test_printed_digests_are_those_of_known_sources_followed_by_those_of_another_release(monkeypatch):
    sources = printed_sources()
    assert sources["KNOWN_SOURCES"] == KNOWN_SOURCES and sources["__doc__"] == known_sources.__doc__
    name = "lightning.pytorch.trainer.call"
    digest = KNOWN_SOURCES[name]["_call_callback_hooks"][0]
    monkeypatch.setitem(KNOWN_SOURCES, name, {"_call_callback_hooks": ("0" * 16,)})
    digests = printed_sources()["KNOWN_SOURCES"][name]
    assert digests["_call_callback_hooks"] == ("0" * 16, digest)
    assert digests.keys() == {"_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook"}
