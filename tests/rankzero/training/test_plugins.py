import pytest
from lightning.pytorch.plugins import AsyncCheckpointIO, DoublePrecision, TorchCheckpointIO
from lightning.pytorch.plugins.environments import KubeflowEnvironment, LightningEnvironment, SLURMEnvironment

from rankzero.messages import RequestError
from rankzero.training.plugins import without_replaced


class OwnCheckpointIO(TorchCheckpointIO):
    pass


class OwnEnvironment(LightningEnvironment):
    pass


@pytest.mark.parametrize(
    ("plugin", "launcher", "requeue"),
    [
        (LightningEnvironment(), "local", "auto"),
        (SLURMEnvironment(), "auto", "auto"),
        (SLURMEnvironment(auto_requeue=False), "auto", "never"),
        (TorchCheckpointIO(), "auto", "auto"),
        (AsyncCheckpointIO(), "auto", "auto"),
        (AsyncCheckpointIO(TorchCheckpointIO()), "auto", "auto"),
    ],
    ids=("local", "slurm", "no_requeue", "torch", "async", "async_torch"),
)
def test_plugins_whose_work_rankzero_does_set_arguments(plugin, launcher, requeue):
    precision, arguments = DoublePrecision(), {"launcher": "auto", "requeue": "auto"}
    assert without_replaced([plugin, precision], arguments) == [precision]
    assert arguments == {"launcher": launcher, "requeue": requeue}


@pytest.mark.parametrize("kind", [OwnCheckpointIO, OwnEnvironment, KubeflowEnvironment])
def test_plugins_that_replace_checkpoints_or_launchers_are_refused_by_name(kind):
    with pytest.raises(RequestError, match=kind.__name__):
        without_replaced([kind()], {"launcher": "auto", "requeue": "auto"})
