import pytest

from rankzero.commands.jobs.check.checker import check

SLURM_HEADER = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=1:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
"""
PBS_HEADER = """#!/bin/bash
#PBS -l select=2:ncpus=8:mpiprocs=2
#PBS -l place=scatter
#PBS -l walltime=1:00:00
cd "$PBS_O_WORKDIR"
"""


@pytest.fixture
def slurm():
    """Returns a function that puts commands after the directives of a batch script: two nodes, one task each.

    Keyword arguments replace directives, with `_` for `-`; None removes a directive. The commands begin with line 9
    plus the number of added directives.
    """

    def script(*commands, **directives):
        lines = SLURM_HEADER.splitlines()
        for name, value in directives.items():
            option = f"#SBATCH --{name.replace('_', '-')}"
            new = [] if value is None else [f"{option}={value}" if value else option]
            at = next((i for i, line in enumerate(lines) if line.partition("=")[0] == option), None)
            if at is None:
                lines += new
            else:
                lines[at : at + 1] = new
        return "\n".join([*lines, *commands]) + "\n"

    return script


@pytest.fixture
def pbs():
    """Returns a function that puts commands after the directives of a job of two chunks; they begin with line 6."""

    def script(*commands, select="2:ncpus=8:mpiprocs=2"):
        header = PBS_HEADER.replace("select=2:ncpus=8:mpiprocs=2", f"select={select}")
        return header + "\n".join(commands) + "\n"

    return script


@pytest.fixture
def findings():
    """Returns a function that returns the line, the level and the text of each finding in a script."""

    def found(text):
        return [(item.line, item.level, item.found) for item in check(text)]

    return found


@pytest.fixture
def only(findings):
    """Returns a function that checks that a script has exactly one finding."""

    def check_only(text, line, level, fragment):
        (found,) = findings(text)
        assert found[:2] == (line, level) and fragment in found[2], found
        (item,) = check(text)
        return item.instead

    return check_only
