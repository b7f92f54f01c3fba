from job_scripts import findings, one_finding, slurm
from rankzero.commands.jobs.check.checker import check

SRUN = "srun --cpus-per-task=4 --kill-on-bad-exit=1 python train.py"
DIRECTIVE = "#SBATCH --mem=64G"
LOGIN = "source /path/to/conda/etc/profile.d/conda.sh && conda activate ddp"
GPUS = "export CUDA_VISIBLE_DEVICES=0,1"
TORCHRUN = "srun -c 4 -K torchrun --nnodes=2"
RENDEZVOUS = "  --rdzv_backend=c10d --rdzv_endpoint=n1:$P train.py"
COMMENT = "wrong: this line begins with an option: a comment in line 10 has ended the command"

CASES = {
    "wrong: sbatch refuses a script whose first line is not #!": [
        (1, slurm(SRUN).removeprefix("#!/bin/bash\n"), "#!/bin/bash"),
        slurm(SRUN),
    ],
    "wrong: lines end with CR LF": [(1, slurm(SRUN).replace("\n", "\r\n")), (9, slurm("# text\r", SRUN))],
    "wrong: the file begins with a byte order mark": [(1, "\ufeff" + slurm(SRUN))],
    "wrong: #SBATCH after the first command (line 9) is ignored": [
        (10, slurm("cd x", f"{DIRECTIVE} --constraint=a100", SRUN), "this line before line 9"),
        # directives of another script
        "#!/bin/bash\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\nEOF\n",
    ],
    "risky: a directive is a line that begins with #SBATCH": [
        *(
            (9, slurm(line, SRUN), DIRECTIVE)
            for line in ("# SBATCH --mem=64G", " #SBATCH --mem=64G", "#sbatch --mem=64G")
        ),
        *(slurm(line, SRUN) for line in ("##SBATCH --mem=64G", "# SBATCH options follow", f"cd x  # {DIRECTIVE[1:]}")),
    ],
    "risky: the job ends with the exit code of line 10": [
        *((9, slurm(SRUN, last)) for last in ("echo done", "exit 0")),
        slurm("set -e", SRUN, "echo done"),
        slurm("set -euo pipefail", SRUN, "echo done"),
        slurm(SRUN, "code=$?", "echo done", "exit $code"),
        slurm(SRUN, "exit $code"),
        slurm(SRUN, 'echo "exit code $?"', "exit 0"),
        slurm(f"{SRUN} || exit 1", "echo done"),
        slurm(f"if {SRUN}; then echo done; fi"),
        slurm(f"{SRUN} && echo done"),
        slurm(SRUN, SRUN),
        slurm("train() {", SRUN, "}", "train", "exit $?"),
        slurm(SRUN, "if [[ $? == 124 ]]; then sbatch $0; fi"),
        slurm("python monitor.py &", SRUN),
        slurm("case $1 in", "  --nodes) N=$2 ;;", "  -h) usage ;;", "esac", "set -e", SRUN),
        *(  # launchers that the rules do not know
            slurm('run() { srun -c 4 -K "$@"; }', f"{launcher} python train.py", "exit $?")
            for launcher in ("ibrun", "horovodrun -np 8", "jsrun -n 8", "run")
        ),
    ],
    "risky: the job ends with the exit code of line 11": [(9, slurm(SRUN, "date", "cp -r runs /archive"))],
    "risky: with the exit code of its last command": [
        (9, slurm(f"{SRUN} | tee log"), "set -o pipefail, before this line"),
        (10, slurm("# pipefail PIPESTATUS $?", f"{SRUN} | tee log")),
        slurm("set -o pipefail", f"{SRUN} 2>&1 | tee log"),
        slurm(f"{SRUN} | tee log", "exit ${PIPESTATUS[0]}"),
    ],
    "wrong: the script does not wait for this command": [
        (9, slurm(f"{SRUN} &"), "wait, after this line"),
        "nohup python train.py &\n",
    ],
    "risky: wait without arguments returns 0": [
        (10, slurm(f"{SRUN} &", "wait")),
        (11, slurm(f"{SRUN} &", f"{SRUN} &", "wait")),
        slurm(f"{SRUN} &", "wait $!"),
    ],
    "risky: `conda activate` fails in a batch script": [
        (9, slurm("conda activate ddp", SRUN), LOGIN),
        slurm("conda activate ddp", SRUN).replace("#!/bin/bash", "#!/bin/bash -l"),
        *(
            slurm(line, "conda activate ddp", SRUN)
            for line in (
                *("source ~/conda/etc/profile.d/conda.sh", 'eval "$(conda shell.bash hook)"', "source ~/.bashrc"),
                *("source /opt/conda/bin/activate", "ml Anaconda3", "module load conda"),
            )
        ),
    ],
    "risky: replaces the GPUs that the scheduler has chosen": [
        (9, slurm(GPUS, SRUN)),
        f"{GPUS}\npython train.py\n",
        slurm(GPUS, SRUN, exclusive=""),
        slurm(*(f"CUDA_VISIBLE_DEVICES={i} python {i}.py &" for i in range(2)), "wait $!", nodes=1),  # shared by runs
    ],
    "wrong: a space follows the backslash": [(9, slurm(f"{TORCHRUN} \\ ", RENDEZVOUS))],
    "wrong: this line begins with an option: a missing backslash in line 9 has ended the command": [
        (10, slurm(TORCHRUN, RENDEZVOUS))
    ],
    COMMENT: [(11, slurm(f"{TORCHRUN} \\", line, RENDEZVOUS)) for line in ("# comment", "# --lr 1 \\")],
    "wrong: is a typographic character": [
        *(
            (9, slurm(line))
            for line in ("srun \u2013c 4 python a.py", "srun -K python a.py \u2014x", "srun \u201ca.py")
        ),
        slurm("# a \u2013 b", "echo \u201cdone\u201d \u2013 now", SRUN),
        slurm(f'{SRUN} "don\u2019t"  # it\u2019s the default'),
    ],
}

test_the_only_finding_in_a_script = one_finding(CASES)


def test_wait_belongs_after_a_loop():
    loop = ("for i in 0 1; do", "  srun -c 4 -K -N1 -w n$i python train.py &", "done")
    (found,) = [item for item in check(slurm(*loop)) if "does not wait" in item.found]
    assert (found.line, found.instead) == (10, "wait, after the loop")
    assert not [item for item in findings(slurm(*loop, "until [ -e done ]; do sleep 9; done")) if "not wait" in item[2]]
