from job_scripts import one_finding, slurm

SRUN = "srun --cpus-per-task=4 --kill-on-bad-exit=1 python train.py"
EPOCHS = f"{SRUN} --epochs 3"
USR1 = "#SBATCH --signal=USR1@120, if the program saves and stops at SIGUSR1, as fit.py does"
PASSED_ON = "; without srun, B:USR1@120 and a trap that passes it on"
TRAP = "trap 'kill -USR1 $!' USR1"
TASKS = {"ntasks_per_node": None, "ntasks": 8}
TO_SCRIPT = {"signal": "B:USR1@120"}

CASES = {
    "correct: an output file in a folder that exists": [
        slurm(SRUN, output=output) for output in ("%j.out", "x.out", "%x/%j.out", "/tmp/x.out")
    ],
    "Slurm sends USR1 to the processes of srun only: the trap in line 9 never runs": [
        (6, slurm(TRAP, SRUN), "#SBATCH --signal=B:USR1@120")
    ],
    "bash runs the trap of line 9 only after this command has ended": [
        (10, slurm(TRAP, SRUN, **TO_SCRIPT), f"{SRUN} &, then wait"),
        slurm(TRAP, f"{SRUN} &", "wait $!", "wait $!", **TO_SCRIPT),
        slurm("trap 'rm -r tmp' EXIT", f"{SRUN} || exit 1"),
    ],
    "no trap handles USR1": [
        (6, slurm(SRUN, **TO_SCRIPT), "#SBATCH --signal=USR1@120, or a trap"),
        slurm(f"exec {SRUN}", **TO_SCRIPT),
    ],
    "does not expand $HOME": [(9, slurm(SRUN, **{name: "$HOME/%j.out"})) for name in ("output", "error")],
}

test_the_only_finding_in_a_script = one_finding(CASES)
