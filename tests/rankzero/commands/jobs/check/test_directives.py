import pytest

from rankzero.commands.jobs.check.directives import read_directives


@pytest.mark.parametrize(
    ("line", "found"),
    [
        *(("#SBATCH --nodes=2", [("nodes", "2")]), ("#SBATCH --nodes 2 # two", [("nodes", "2")])),
        ("#SBATCH -N2 -n 4", [("nodes", "2"), ("ntasks", "4")]),
        ("#SBATCH --requeue --time=1:00", [("requeue", ""), ("time", "1:00")]),
        *(("#SBATCH --tasks-per-node=4", [("ntasks-per-node", "4")]), ("#SBATCH --comment='a b", [("comment", "'a")])),
        ("#SBATCH --job-name='a b'", [("job-name", "a b")]),
        *((line, []) for line in ("# SBATCH --nodes=2", "##SBATCH --nodes=2", " #SBATCH --nodes=2", "#SBATCH")),
    ],
)
def test_options_of_sbatch(line, found):
    directives = read_directives(["#!/bin/bash", line], "slurm")
    assert [(item.name, item.value) for item in directives][: len(found) or None] == found
    assert {item.line for item in directives} <= {2}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("#PBS -N ddp", [("N", "ddp")]),
        ("#PBS -l select=2:ncpus=8:mpiprocs=2+1:ncpus=1", [("select", "2:ncpus=8:mpiprocs=2+1:ncpus=1")]),
        (
            "#PBS -l select=2:ncpus=8,place=scatter:excl,walltime=1:00:00",
            [("select", "2:ncpus=8"), ("place", "scatter:excl"), ("walltime", "1:00:00")],
        ),
        ("#PBS -l nodes=2:ppn=4", [("nodes", "2:ppn=4")]),
        ("#PBS -V -j oe", [("V", ""), ("j", "oe")]),
    ],
)
def test_options_of_qsub(line, found):
    assert [(item.name, item.value) for item in read_directives([line], "pbs")] == found
