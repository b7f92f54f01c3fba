"""Job scripts of users, and the findings in them."""

from rankzero.jobs.check.checker import check


def slurm(*lines, nodes=2, tasks=1):
    """Returns a batch script with these lines from line 4 on."""
    return "\n".join(["#!/bin/bash", f"#SBATCH --nodes={nodes}", f"#SBATCH --ntasks-per-node={tasks}", *lines, ""])


def pbs(*lines, select="2:ncpus=8:mpiprocs=1"):
    """Returns a job script of PBS with these lines from line 4 on."""
    return "\n".join(["#!/bin/bash", f"#PBS -l select={select}", "#PBS -l place=scatter", *lines, ""])


def assert_findings(*rows):
    """Checks that each script has the one finding beside it, in this line and with this beginning, or none.

    Args:
        *rows: A script, the line and the beginning of its finding; or a script without a finding.
    """
    for row in rows:
        script, *expected = [row] if isinstance(row, str) else row
        findings = check(script)
        assert len(findings) == bool(expected), (script, findings)
        for line, found, _ in findings:
            assert line == expected[0] and found.startswith(expected[1]), (script, findings)
