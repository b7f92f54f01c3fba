"""Every launcher is listed in the flags, the documentation and the error reporter."""

import pkgutil

import pytest

from rankzero.cli.flags import flags_of
from rankzero.distributed.environments import launchers
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import RequestedWorld
from rankzero.distributed.environments.launchers import LAUNCHERS
from rankzero.distributed.stop_and_failure.error_reporter import RANK_VARIABLES
from recorded import ENV, FLUX, OPEN_MPI, PBS_TASK, STEP, TORCHRUN
from running import REPOSITORY, refusal_of

RECORDED = {"torchrun": TORCHRUN, "mpi": OPEN_MPI, "slurm": STEP, "pbs": PBS_TASK, "env": ENV, "flux": FLUX}
OTHER_LAUNCHERS = [name for name in LAUNCHERS if name != "local"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_module_is_a_launcher_a_flag_value_and_documented(name):
    assert sorted(module.name for module in pkgutil.iter_modules(launchers.__path__)) == sorted(LAUNCHERS)
    (flag,) = [flag for flag in flags_of("fit") if flag.name == "launcher"]
    assert flag.read(name) == name and f" {name}" in flag.help
    assert f"| `{name}` |" in (REPOSITORY / "docs/launchers.md").read_text()


@pytest.mark.parametrize("name", OTHER_LAUNCHERS)
def test_every_launcher_has_a_command_to_type_and_rank_variables_that_the_error_reporter_knows(name):
    assert "launch/fit.py" in LAUNCHERS[name].command_for() and "{" not in LAUNCHERS[name].command_for()
    assert any(number in LAUNCHERS[name].command_for(3, 5) for number in ("3", "5", "15"))
    assert LAUNCHERS[name].command_for() in refusal_of(detect, RequestedWorld(launcher=name), {}).instead
    assert {*LAUNCHERS[name].rank_variables} <= {*RANK_VARIABLES}
    assert any(variable in RECORDED[name] for variable in LAUNCHERS[name].rank_variables)


@pytest.mark.parametrize("name", [name for name in OTHER_LAUNCHERS if name != "pbs"])
def test_launcher_local_is_refused_in_one_of_several_processes(name):
    error = refusal_of(detect, RequestedWorld(launcher="local"), RECORDED[name])
    assert "each would start a separate run" in error.found
