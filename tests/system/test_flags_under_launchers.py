"""Every flag reaches the script under a launcher, although the launcher's parser could claim it."""

import pytest
from torch.distributed.run import parse_args

from running import command_of, require, run

COMMANDS = ("fit", "evaluate", "predict")
FLAGS = sorted({(flag.name, flag.example) for command in COMMANDS for flag in command_of(command).flags})
ALIASES = sorted(
    {name for command in COMMANDS for flag in command_of(command).flags for name in flag.aliases} - {"run"}
)
"""Without `--run`, which torchrun's parser rejects as an abbreviation of its own `--run-path`."""

ARGUMENTS = [
    *(argument for name, example in FLAGS for argument in (f"--{name}", example)),
    *(argument for name in sorted(ALIASES) for argument in (f"--{name}", "x")),
    *("--model", "MLP", "--data", "Toy", "--config", "x.yaml", "--model.depth", "18", "--explain", "--help_all"),
]


@pytest.mark.parametrize("equals", [False, True], ids=["apart", "with ="])
@pytest.mark.parametrize("start", [["launch/fit.py"], ["-m", "rankzero"]], ids=["script", "module"])
def test_torchrun_passes_every_flag_to_the_script(start, equals):
    expected = ["fit", *(f"{flag}=x" for flag in ARGUMENTS if flag.startswith("--"))] if equals else ARGUMENTS
    arguments = parse_args(["--nnodes", "1", "--nproc-per-node", "2", *start, *expected])
    assert arguments.training_script_args == expected


@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_mpirun_passes_every_flag_to_the_script(launcher, tmp_path):
    require(launcher)
    program = {"openmpi": ("mpirun.openmpi", "--allow-run-as-root"), "mpich": ("mpiexec.hydra",)}[launcher]
    script = ["sh", "-c", 'echo "$@"; sleep 0.5', "sh"]  # hydra loses the output of a process that exits immediately
    assert run(*program, "-np", "1", *script, *ARGUMENTS, folder=tmp_path).out.split() == ARGUMENTS
