from job_scripts import assert_findings, pbs, slurm

C10D = "--nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$HOST:29500"
STATIC = "torchrun --nnodes=2 --nproc-per-node=4 --master-addr=n1 --master-port=29500"
ON_TWO = f"torchrun --nnodes=2 {C10D} train.py"
ALONE = "each machine trains alone"
ITSELF = "each machine waits for the others on itself"


def test_a_command_that_starts_on_the_first_machine_only():
    python, accelerate = "one process starts on the first machine only", "accelerate launch --num_machines {} train.py"
    assert_findings(
        (slurm("python train.py", tasks=4), 4, f"{python}, in a job of 2 nodes"),
        (slurm("source ~/venv/bin/activate", ON_TWO), 5, "torchrun starts on the first machine only, in a job of 2"),
        (slurm(accelerate.format(1)), 4, "accelerate starts on the first machine only"),
        (pbs("python train.py"), 4, f"{python}, in a job of 2 chunks"),
        (pbs("python train.py").replace("place=scatter", "walltime=1:00").replace("select", "nodes"), 4, python),
        (pbs(ON_TWO).replace("place=scatter", "walltime=1:00"), 4, "torchrun starts on the first machine only"),
        pbs("python train.py").replace("place=scatter", "walltime=1:00"),  # chunks may share a machine
        *(slurm("python train.py", tasks=8, nodes=nodes) for nodes in (1, "$N", "1-4")),
        slurm("python train.py").replace("nodes=2", "ntasks=8"),  # a way to request cores
        *(slurm("python prepare.py", other) for other in (f"srun {ON_TWO}", "bash run.sh", "$RUN", "srun ray start")),
        slurm("accelerate launch train.py"),  # the user's file may start the others with DeepSpeed
        *(slurm(f"{test}python train.py") for test in ('[ -n "$DEBUG" ] && ', "[[ $1 ]] || ")),
        slurm("if true; then", "python train.py", "fi"),
        slurm("run() {", "python train.py", "}", "function other {", "python train.py", "}"),
        slurm("cat >run.sh <<EOF", "python train.py", "EOF", "eval 'python train.py'"),
    )


def test_a_launcher_per_process():
    two = [slurm(f"srun {options} {ON_TWO}", tasks=4) for options in ("--ntasks-per-node=1", "-N2 --ntasks-per-node 1")]
    assert_findings(
        (slurm(f"srun {ON_TWO}", tasks=4), 4, "srun starts torchrun 8 times, for 2 machines"),
        (slurm(f"srun --ntasks=8 {ON_TWO}").replace("#SBATCH --ntasks", "#S"), 4, "srun starts torchrun 8 times"),
        (pbs(f"pbsdsh -- {ON_TWO}", select="2:mpiprocs=2"), 4, "pbsdsh starts torchrun 4 times, for 2 machines"),
        (pbs(f"mpirun -np 4 {ON_TWO}"), 4, "mpirun starts torchrun 4 times, for 2 machines"),
        (f"mpiexec -n 4 {ON_TWO.replace('=2', '=1')}\n", 1, "mpirun starts torchrun 4 times, for 1 machine"),
        *two,
        slurm(f"srun {ON_TWO.replace('=2', '=8')}", tasks=4),  # one process each
        pbs(f"mpirun -np 2 {ON_TWO}"),
    )


def test_machines_that_do_not_find_each_other():
    each = "srun bash -c 'torchrun --standalone train.py --index $SLURM_NODEID'"
    accelerate = "srun accelerate launch --num_machines={}"
    rank = "without --{}, every machine has"
    assert_findings(
        *(
            (slurm(f"srun torchrun {text} train.py"), 4, f"torchrun expects one machine: {ALONE}")
            for text in ("", "--standalone", "--nnodes=1")
        ),
        (slurm(accelerate.format("1 train.py")), 4, f"accelerate expects one machine: {ALONE}"),
        (slurm(accelerate.format("2 --main_process_ip n1 train.py")), 4, rank.format("machine_rank") + " rank 0"),
        (slurm("srun torchrun --standalone --nnodes=2 train.py"), 4, "--standalone ignores the other machines"),
        (slurm("srun torchrun --nnodes $SLURM_NNODES train.py"), 4, "without an address, each of the 2 machines"),
        (slurm("H=localhost", f"srun {ON_TWO.replace('$HOST', '$H')}"), 5, f"at localhost:29500, {ITSELF}"),
        (slurm(f"srun {STATIC} train.py"), 4, rank.format("node-rank") + " node rank 0"),
        (slurm("R=0", f"srun {STATIC} --node_rank $R train.py"), 5, "srun starts torchrun with node rank 0 on every"),
        (slurm(f"srun {ON_TWO.replace('=2', '=4')}"), 4, "--nnodes 4 does not match the job (nodes: 2)"),
        slurm(each),  # runs of their own
        slurm(accelerate.format("2 --rdzv_backend=c10d train.py"), accelerate.format("2 --config_file a train.py")),
        *(slurm(f"srun torchrun {options} train.py") for options in ("$OPTIONS", '"${OPTIONS[@]}"', "$(options)")),
        *(slurm(way, "srun torchrun --nnodes=$N train.py") for way in ("read N", "for N in 2; do :; done", "((N=2))")),
        slurm("N=1", "source settings.sh", "srun torchrun --nnodes=$N train.py"),
        slurm("export PET_NNODES=2", "srun torchrun train.py"),
        slurm("srun torchrun --nproc-per-node=4 train.py", nodes=1),
        *(f"torchrun --nnodes={nodes} train.py\n" for nodes in ("2", "${NODES:-2}")),  # by hand, with PET_NNODES
        slurm(*(f"srun -N1 -n1 -w {host} {STATIC} --node-rank={i} a.py &" for i, host in enumerate("ab")), "wait"),
    )


def test_commands_for_several_machines_in_sequence():
    first, second = (f"{STATIC} --node-rank={i} train.py" for i in range(2))
    found = "node rank 0 waits for node rank 1, whose command starts after this one has ended"
    assert_findings(
        (f"{first}\n{second}\n", 1, found),
        (f"ssh n1 {first}\nssh n2 {second}\n", 1, found),
        f"{first} &\n{second}\nwait\n",
        f"if [ $1 = 0 ]; then\n{first}\nelse\n{second}\nfi\n",
    )


def test_fewer_processes_than_the_world_size():
    found = "WORLD_SIZE is 8, but mpirun starts 4 processes"
    assert_findings(
        ("mpirun -np 4 -x WORLD_SIZE=8 python train.py\n", 1, found),
        ("export WORLD_SIZE=8\nmpirun -n 4 -x WORLD_SIZE python train.py\n", 2, found),
        "mpirun -np 8 -x WORLD_SIZE=8 python train.py\n",
        "export WORLD_SIZE=$N\nmpirun -np 4 python train.py\n",
        "mpirun -np 2 --map-by ppr:1:node -x WORLD_SIZE=8 python train.py\n",  # each starts others
    )
