import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from rankzero.distributed.monitoring.activity import DATA, FORWARD, Activity
from rankzero.tracking.measurements.flop_count import FlopCount, can_count


class Record:
    samples = 0


def count(step, phase=FORWARD):
    activity, record = Activity(), Record()
    activity.enter(phase)
    counter = FlopCount(activity, record)
    with counter:
        step()
        record.samples += 4
    return counter


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))


def test_forward_and_backward_passes_are_counted_as_torch_counts_them():
    model, inputs = network(), torch.rand(4, 3, 8, 8)
    with FlopCounterMode(display=False) as stock:
        model(inputs).sum().backward()
    assert count(lambda: model(inputs).sum().backward()).flops == stock.get_total_flops() > 0


def test_operations_are_counted_per_sample():
    counter = count(lambda: nn.Linear(5, 7)(torch.rand(4, 5)))
    assert counter.per_sample == 2 * 5 * 7


def test_operations_outside_the_passes_are_not_counted():
    counter = count(lambda: nn.Linear(5, 7)(torch.rand(4, 5)), phase=DATA)
    assert counter.flops == 0 and counter.per_sample is None


def test_a_formula_that_fails_does_not_change_the_step(monkeypatch):
    def fail(*arguments, **settings):
        raise ValueError("unknown arguments")

    monkeypatch.setitem(flop_registry, torch.ops.aten.addmm, fail)
    model, inputs = nn.Linear(5, 7), torch.rand(4, 5)
    outputs = []
    assert count(lambda: outputs.append(model(inputs))).flops == 0
    assert torch.equal(outputs[0], model(inputs))


def test_counting_changes_no_gradient():
    gradients = []
    for counted in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(network(), nn.Dropout(), nn.Linear(10, 2))
        inputs = torch.rand(4, 3, 8, 8)

        def step(model=model, inputs=inputs):
            model(inputs).square().sum().backward()

        count(step) if counted else step()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_compiled_module_is_not_counted():
    module = BoringModel()
    assert can_count(module)
    module.layer = torch.compile(module.layer, backend="eager")
    assert not can_count(module)
    module = BoringModel()
    module.layer.compile(backend="eager")
    assert not can_count(module)
