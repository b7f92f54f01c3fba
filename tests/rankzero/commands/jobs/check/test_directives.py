from rankzero.commands.jobs.check.directives import read_directives


def test_options_of_sbatch():
    for line, found in (
        *((f"#SBATCH {option}", [("nodes", "2")]) for option in ("--nodes=2", "--nodes 2 # two")),
        ("#SBATCH -N2 -n 4", [("nodes", "2"), ("ntasks", "4")]),
        ("#SBATCH --requeue --time=1:00", [("requeue", ""), ("time", "1:00")]),
        *(("#SBATCH --tasks-per-node=4", [("ntasks-per-node", "4")]), ("#SBATCH --comment='a b", [("comment", "'a")])),
        ("#SBATCH --job-name='a b'", [("job-name", "a b")]),
        *((line, []) for line in ("# SBATCH --nodes=2", "##SBATCH --nodes=2", " #SBATCH --nodes=2", "#SBATCH")),
    ):
        directives = read_directives(["#!/bin/bash", line], "slurm")
        assert [(item.name, item.value) for item in directives][: len(found) or None] == found
        assert {item.line for item in directives} <= {2}


def test_options_of_qsub():
    select, chunks = "select=2:ncpus=8:mpiprocs=2+1:ncpus=1", "2:ncpus=8:mpiprocs=2+1:ncpus=1"
    several = {"select": "2:ncpus=8", "place": "scatter:excl", "walltime": "1:00:00"}
    for line, found in {
        "-N ddp": {"N": "ddp"},
        f"-l {select}": {"select": chunks},
        "-l select=2:ncpus=8,place=scatter:excl,walltime=1:00:00": several,
        "-l nodes=2:ppn=4": {"nodes": "2:ppn=4"},
        "-V -j oe": {"V": "", "j": "oe"},
    }.items():
        assert [(item.name, item.value) for item in read_directives([f"#PBS {line}"], "pbs")] == list(found.items())
