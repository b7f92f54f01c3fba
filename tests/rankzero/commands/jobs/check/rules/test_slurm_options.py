from job_scripts import findings, one_finding, only, slurm

SRUN = "srun --cpus-per-task=4 --kill-on-bad-exit=1 python train.py"
EPOCHS = f"{SRUN} --epochs 3"
USR1 = "#SBATCH --signal=USR1@120, if the program saves and stops at SIGUSR1, as fit.py does"
PASSED_ON = "; without srun, B:USR1@120 and a trap that passes it on"
TRAP = "trap 'kill -USR1 $!' USR1"
TASKS = {"ntasks_per_node": None, "ntasks": 8}
TO_SCRIPT = {"signal": "B:USR1@120"}

CASES = {
    "risky: without a time limit, the default of the partition applies": [
        (2, slurm(SRUN, time=None), "#SBATCH --time=HH:MM:SS"),
        "#!/bin/bash\n#SBATCH --nodes=1\ncp -r data /scratch\n",  # trains nothing
    ],
    "risky: no signal precedes the time limit": [
        (2, slurm(SRUN, signal=None), USR1),
        (2, slurm("python train.py", nodes=1, signal=None), USR1 + PASSED_ON),
    ],
    "risky: whether the job is requeued after the loss of a node depends on the site": [
        (2, slurm(SRUN, requeue=None), "#SBATCH --requeue"),
        slurm(SRUN, requeue=None, open_mode=None, no_requeue=""),
    ],
    "risky: a requeued job overwrites the output of its earlier attempt": [
        (2, slurm(SRUN, open_mode=None), "#SBATCH --open-mode=append")
    ],
    "risky: each task gets one core, unless": [
        (2, slurm("srun -K python train.py", cpus_per_task=None)),
        slurm("srun -K python train.py", cpus_per_task=None, exclusive=""),
        slurm("srun -K -c 8 python train.py", cpus_per_task=None),
    ],
    "risky: Slurm may put the 8 tasks unevenly on the nodes": [
        (8, slurm(EPOCHS, **TASKS), "#SBATCH --ntasks-per-node=4"),
        (7, slurm(EPOCHS, nodes=None, **TASKS), "#SBATCH --nodes=N, and #SBATCH --ntasks-per-node=N"),
        *(slurm(EPOCHS, **TASKS | {"nodes": nodes, "ntasks": 4}) for nodes in (1, 4)),
    ],
    "correct: an output file in a folder that exists": [
        slurm(SRUN, output=output) for output in ("%j.out", "x.out", "%x/%j.out", "/tmp/x.out")
    ],
    "wrong: Slurm sends USR1 to the processes of srun only: the trap in line 9 never runs": [
        (6, slurm(TRAP, SRUN), "#SBATCH --signal=B:USR1@120")
    ],
    "wrong: bash runs the trap of line 9 only after this command has ended": [
        (10, slurm(TRAP, SRUN, **TO_SCRIPT), f"{SRUN} &, then wait"),
        slurm(TRAP, f"{SRUN} &", "wait $!", "wait $!", **TO_SCRIPT),
        slurm("trap 'rm -r tmp' EXIT", f"{SRUN} || exit 1"),
    ],
    "wrong: no trap handles USR1": [
        (6, slurm(SRUN, **TO_SCRIPT), "#SBATCH --signal=USR1@120, or a trap"),
        slurm(f"exec {SRUN}", **TO_SCRIPT),
    ],
    "wrong: does not expand $HOME": [(9, slurm(SRUN, **{name: "$HOME/%j.out"})) for name in ("output", "error")],
    "risky: all members of the job array write to this file": [
        (10, slurm(SRUN, array="0-3", output="sweep.out")),
        (10, slurm(SRUN, array="0-3", output="%x-%A.out")),
        slurm(SRUN, array="0-3", output="%A_%4a.out"),
    ],
    "risky: megabytes: 64 MB": [
        (9, slurm(SRUN, mem="64"), "#SBATCH --mem=64G"),
        (9, slurm(SRUN, mem_per_gpu="64"), "#SBATCH --mem-per-gpu=64G"),
        *(slurm(SRUN, **{name: value}) for name in ("mem", "mem_per_gpu") for value in ("64G", "64000", "0")),
    ],
}

test_the_only_finding_in_a_script = one_finding(CASES)


def test_slurm_does_not_create_the_folder_of_the_output(cwd):
    text = slurm(SRUN, output="logs/%j.out")
    only(text, 9, "risky", "the folder logs does not exist here", "mkdir -p logs, before sbatch")
    (cwd / "logs").mkdir()
    assert findings(text) == []
