import math
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.measurements.resources import memory_in_use, prepared_batches


def trainer_with(loader):
    managed = SamplingPlan().wrap(loader, True, lambda value: value, None)
    return SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[managed]))), managed


@pytest.mark.parametrize("is_persistent", [False, True])
def test_batches_that_loader_processes_have_prepared_are_counted(is_persistent):
    settings = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": is_persistent}
    trainer, loader = trainer_with(DataLoader(torch.arange(100), batch_size=1, **settings))
    assert math.isnan(prepared_batches(trainer))
    batches = iter(loader)
    next(batches)
    while prepared_batches(trainer) < 3:
        time.sleep(0.01)
    assert prepared_batches(trainer) == 3
    loader._iterator = None
    del batches
    assert math.isnan(prepared_batches(trainer))
    trainer, loader = trainer_with(DataLoader(torch.arange(4)))
    next(iter(loader))  # without processes
    assert math.isnan(prepared_batches(trainer))


def test_memory_of_the_process_is_measured_in_gib():
    memory = memory_in_use(torch.device("cpu"))
    assert 0.05 < memory["workload/host_memory_gib"] < 64
    assert math.isnan(memory["workload/device_memory_gib"])
