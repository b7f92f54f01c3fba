"""Job scripts of users, and the findings in them."""

import pytest

from rankzero.commands.jobs.check.checker import check

SBATCH = {"nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "4", "time": "1:00:00"}
SBATCH |= {"signal": "USR1@120", "requeue": "", "open-mode": "append"}
PBS_HEADER = """#!/bin/bash
#PBS -l select={}
#PBS -l place=scatter
#PBS -l walltime=1:00:00
cd "$PBS_O_WORKDIR"
"""


def slurm(*commands, **directives):
    """Returns a batch script for two nodes with one task each.

    Args:
        commands: Lines after the directives; they begin with line 9 plus the number of added directives.
        directives: Directives that are added or replaced, with `_` for `-`; None removes a directive.
    """
    values = SBATCH | {name.replace("_", "-"): value for name, value in directives.items()}
    options = [f"{name}={value}" if value else name for name, value in values.items() if value is not None]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH --{option}" for option in options), *commands]) + "\n"


def pbs(*commands, select="2:ncpus=8:mpiprocs=2"):
    """Returns a job script of PBS for two chunks, with commands that begin with line 6."""
    return PBS_HEADER.format(select) + "\n".join(commands) + "\n"


def findings(text):
    """Returns the line and the text of each finding in a script."""
    return [(item.line, item.found) for item in check(text)]


def only(text, line, fragment, instead=None):
    """Checks that a script has exactly one finding."""
    (item,) = check(text)
    assert item.line == line and fragment in item.found, item
    assert instead in (None, item.instead)


def one_finding(cases):
    """Returns a test that checks scripts that have one finding, or none.

    Args:
        cases: Part of the text of the finding, `one process starts` -> the cases: line of the finding, script and,
            optionally, what to write instead; or a script that has no finding.
    """

    @pytest.mark.parametrize("finding", cases)
    def verify(finding):
        for case in cases[finding]:
            if isinstance(case, str):
                assert findings(case) == [], case
            else:
                line, script, *instead = case
                only(script, line, finding, *instead)

    return verify
