import pytest

from job_scripts import findings, slurm, verify
from rankzero.commands.jobs.check.checker import check

SRUN = "srun --cpus-per-task=4 --kill-on-bad-exit=1 python train.py"
DIRECTIVE = "#SBATCH --mem=64G"
LOGIN = "source /path/to/conda/etc/profile.d/conda.sh && conda activate ddp"
GPUS = "export CUDA_VISIBLE_DEVICES=0,1"
CRLF = "lines end with CR LF"
NO_HEAD = "sbatch refuses a script whose first line is not #!"
PIPEFAIL = "set -o pipefail, before this line"
RENDEZVOUS = "  --rdzv_backend=c10d --rdzv_endpoint=n1:$P train.py"

CASES = {
    "a correct batch script": [slurm(SRUN)],
    "the form of a file that sbatch does not read as meant": [
        (slurm(SRUN).removeprefix("#!/bin/bash\n"), 1, "wrong", NO_HEAD, "#!/bin/bash"),
        (slurm(SRUN).replace("\n", "\r\n"), 1, "wrong", CRLF),
        (slurm("# text\r", SRUN), 9, "wrong", CRLF),
        ("\ufeff" + slurm(SRUN), 1, "wrong", "the file begins with a byte order mark"),
        (
            slurm("cd x", "#SBATCH --mem=64G --constraint=a100", SRUN),
            *(10, "wrong", "#SBATCH after the first command (line 9) is ignored", "this line before line 9"),
        ),
    ],
    "a comment that looks like a directive": [
        *(
            (slurm(line, SRUN), 9, "risky", "a directive is a line that begins with #SBATCH", DIRECTIVE)
            for line in (f"# {DIRECTIVE[1:]}", f" {DIRECTIVE}", "#sbatch --mem=64G")
        ),
        *(slurm(line, SRUN) for line in (f"#{DIRECTIVE}", "# SBATCH options follow", f"cd x  # {DIRECTIVE[1:]}")),
    ],
    "an exit code that other commands lose": [
        *(
            (slurm(SRUN, *last), 9, "risky", f"the job ends with the exit code of line {9 + len(last)}")
            for last in (["echo done"], ["exit 0"], ["date", "cp -r runs /archive"])
        ),
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
    ],
    "the exit code of a pipeline": [
        (slurm(f"{SRUN} | tee log"), 9, "risky", "with the exit code of its last command", PIPEFAIL),
        (slurm("# pipefail PIPESTATUS $?", f"{SRUN} | tee log"), 10, "risky", "its last command"),  # in a comment
        slurm("set -o pipefail", f"{SRUN} 2>&1 | tee log"),
        slurm(f"{SRUN} | tee log", "exit ${PIPESTATUS[0]}"),
    ],
    "commands in the background": [
        (slurm(f"{SRUN} &"), 9, "wrong", "the script does not wait for this command", "wait, after this line"),
        (slurm(f"{SRUN} &", "wait"), 10, "risky", "wait without arguments returns 0"),
        (slurm(f"{SRUN} &", f"{SRUN} &", "wait"), 11, "risky", "wait without arguments returns 0"),
        slurm(f"{SRUN} &", "wait $!"),
        "nohup python train.py &\n",
    ],
    "conda in a batch script": [
        (slurm("conda activate ddp", SRUN), 9, "risky", "`conda activate` fails in a batch script", LOGIN),
        slurm("conda activate ddp", SRUN).replace("#!/bin/bash", "#!/bin/bash -l"),
        *(
            slurm(line, "conda activate ddp", SRUN)
            for line in (
                *("source ~/conda/etc/profile.d/conda.sh", 'eval "$(conda shell.bash hook)"', "source ~/.bashrc"),
                *("source /opt/conda/bin/activate", "ml Anaconda3", "module load conda"),
            )
        ),
    ],
    "a script that chooses its GPUs": [
        (slurm(GPUS, SRUN), 9, "risky", "replaces the GPUs that the scheduler has chosen"),
        f"{GPUS}\npython train.py\n",
        slurm(GPUS, SRUN, exclusive=""),
        slurm(*(f"CUDA_VISIBLE_DEVICES={i} python {i}.py &" for i in range(2)), "wait $!", nodes=1),  # shared by runs
    ],
    "a space after the backslash": [
        (slurm("srun -c 4 -K torchrun --nnodes=2 \\ ", RENDEZVOUS), 9, "wrong", "a space follows the backslash")
    ],
    "a line that begins with an option": [
        (
            slurm("srun -c 4 -K torchrun --nnodes=2" + " \\" * bool(middle), *middle, RENDEZVOUS),
            *(10 + len(middle), "wrong", f"this line begins with an option: {reason} has ended the command"),
        )
        for middle, reason in (
            ([], "a missing backslash in line 9"),
            (["# comment"], "a comment in line 10"),
            (["# --lr 1 \\"], "a comment in line 10"),
        )
    ],
    "a character of a word processor": [
        *(
            (slurm(command), 9, "wrong", "is a typographic character")
            for command in ("srun \u2013c 4 python a.py", "srun -K python a.py \u2014x", "srun \u201ca.py")
        ),
        slurm("# a \u2013 b", "echo \u201cdone\u201d \u2013 now", SRUN),
        slurm(f'{SRUN} "don\u2019t"  # it\u2019s the default'),
    ],
    "a launcher that the rules do not know": [
        slurm('run() { srun -c 4 -K "$@"; }', f"{launcher} python train.py", "exit $?")
        for launcher in ("ibrun", "horovodrun -np 8", "jsrun -n 8", "run")
    ],
    "directives in a here-document, which are those of another script": [
        "#!/bin/bash\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\nEOF\n"
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_the_findings(name):
    verify(CASES[name])


def test_wait_belongs_after_a_loop():
    loop = ("for i in 0 1; do", "  srun -c 4 -K -N1 -w n$i python train.py &", "done")
    (found,) = [item for item in check(slurm(*loop)) if "does not wait" in item.found]
    assert (found.line, found.instead) == (10, "wait, after the loop")
    assert not [item for item in findings(slurm(*loop, "until [ -e done ]; do sleep 9; done")) if "not wait" in item[2]]
