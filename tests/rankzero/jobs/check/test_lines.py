from job_scripts import assert_findings, slurm

SRUN = "srun python train.py"
LONG = ("srun torchrun --nnodes=2 \\", "  --rdzv_backend=c10d --rdzv_endpoint=n1:1 train.py")


def test_lines_that_end_too_early():
    found = "this line begins with an option: {} in line {} has ended the command"
    assert_findings(
        (slurm(f"{LONG[0]} ", LONG[1]), 4, "a space follows the backslash"),
        (slurm(LONG[0][:-1].strip(), LONG[1]), 5, found.format("a missing backslash", 4)),
        *((slurm(LONG[0], line, LONG[1]), 6, found.format("a comment", 5)) for line in ("# a", "# a \\")),
        slurm(*LONG),
        slurm("cat <<EOF", *LONG, "a \\ ", "-b", "EOF", "case $1 in", "-x) echo;;", "esac"),
        slurm("ARGS=(", "  --lr 1", ")", SRUN),
    )


def test_directives_that_slurm_ignores_or_refuses():
    hidden = ('echo "', "#SBATCH --time=1", '" >job.sh', SRUN)
    assert_findings(
        (slurm(SRUN)[12:], 1, "sbatch refuses a script that does not begin with #!"),
        ("\ufeff" + slurm(SRUN), 1, "sbatch refuses a script that does not begin with #! (a byte order mark"),
        (slurm("# a\r", SRUN), 4, "lines end with CR LF"),
        (slurm("cd x", "#SBATCH --mem=4G", SRUN), 5, "#SBATCH after the first command (line 4) is ignored"),
        slurm("cat <<EOF", *hidden[1:2], "EOF", SRUN),
        slurm(*hidden),
        *((slurm(f"#SBATCH {option}=$HOME/x", SRUN), 4, "Slurm does not expand $HOME") for option in ("-o", "--error")),
        (slurm("#SBATCH --mem=16Go", SRUN), 4, "sbatch refuses --mem=16Go"),
        *(slurm(f"#SBATCH --mem{value}", SRUN) for value in ("=16G", "=16GB", "=0", "-per-cpu=4000", "=$MEMORY")),
    )


def test_traps_that_never_run_or_too_late():
    trap = "trap 'kill -USR1 $!' {}"
    to_script = "#SBATCH --signal=B:USR1@120"
    assert_findings(
        (slurm(to_script.replace("B:", ""), trap.format("USR1"), f"{SRUN} &", "wait"), 4, "Slurm sends USR1 to the"),
        (slurm(to_script, trap.format("SIGUSR1"), SRUN), 6, "bash runs the trap of line 5 only after this command"),
        slurm(to_script, trap.format("USR1"), f"{SRUN} | tee x &", "wait"),
        slurm(to_script, trap.format("EXIT"), SRUN),
    )


def test_training_in_the_background_of_a_script_that_ends():
    assert_findings(
        (slurm(f"cd x && {SRUN} &", "echo started"), 4, "the script does not wait for this command"),
        *(slurm(f"{SRUN} &", line) for line in ("wait", "until [ -e x ]; do sleep 9; done", "./monitor")),
        "nohup python train.py &\n",
    )
