from job_scripts import assert_findings, pbs, slurm

PYTHON = "srun python train.py"
NODE = "torchrun --nnodes=2 --node_rank={} --master_addr=$HOST --master_port=29500 train.py"
C10D = "torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_id={} --rdzv_endpoint={} train.py"


def test_variables_that_the_job_script_expands_itself():
    found = "the job script expands ${} itself, so that all tasks get the same value"
    rank, node = found.format("SLURM_PROCID"), found.format("SLURM_NODEID")
    assert_findings(
        (slurm(f"{PYTHON} --rank $SLURM_PROCID"), 4, rank),
        (slurm("export RANK=$SLURM_PROCID", PYTHON), 4, rank),
        (slurm('srun bash -c "python train.py --rank ${SLURM_PROCID}"'), 4, rank),
        (slurm(f'srun bash -c "{NODE.format("$SLURM_NODEID")}"'), 4, node),
        (slurm("R=$SLURM_NODEID", f"srun {NODE.format('$R')}"), 5, node),
        (slurm("export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID", PYTHON, tasks=2), 4, found.format("SLURM_LOCALID")),
        (pbs(f"pbsdsh -- {NODE.format('$PBS_NODENUM')}"), 4, found.format("PBS_NODENUM")),
        ('mpirun -np 2 bash -c "RANK=$PMI_RANK python train.py"\n', 1, found.format("PMI_RANK")),
        "mpirun -np 2 bash -c 'RANK=$PMI_RANK python train.py'\n",
        slurm(f"srun bash -c '{NODE.format('$SLURM_NODEID')}'"),
        slurm(f'srun bash -c "{NODE.format(chr(92) + "$SLURM_NODEID")}"'),
        slurm(f"srun {NODE.format('$SLURM_NODEID')}".replace("--master_addr", "--rdzv_backend=c10d --rdzv_endpoint")),
        slurm(f"srun {NODE.format('$SLURM_NODEID')}".replace("=2", "=1"), nodes=1),
        slurm("task() { export RANK=$SLURM_PROCID; }", PYTHON),
        slurm('echo "on $SLURM_NODEID"', "export LOG=$SLURM_NODEID.log", PYTHON),
    )


def test_variables_that_the_tasks_do_not_get():
    head, nested = "MASTER_ADDR=n1", "srun bash -c 'torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$H:1 a.py'"
    assert_findings(
        (slurm(head, 'echo "$MASTER_ADDR"', PYTHON), 4, "the tasks of srun do not get MASTER_ADDR"),
        (slurm("H=n1", nested), 4, "the tasks of srun do not get H"),
        (pbs(f"export {head}", "pbsdsh -- /env/bin/python /x/train.py"), 4, "the tasks of pbsdsh do not get MASTER"),
        *(slurm(text, PYTHON) for text in (f"export {head}", f"{head}; export MASTER_ADDR", f"set -a; {head}")),
        slurm(head, "export URL=tcp://$MASTER_ADDR:1", PYTHON),
        slurm(head, "srun --export=ALL,MASTER_ADDR=n1 python train.py"),
        slurm("H=n1", nested.replace("torchrun", "H=n2; torchrun")),
        slurm("source settings.sh", head, PYTHON),
    )


def test_addresses_that_other_machines_do_not_reach():
    compressed, itself = "the list of nodes is compressed", "each machine waits for the others on itself"
    own, all_names = "each machine runs $(hostname) itself", "$(scontrol show hostnames $SLURM_JOB_NODELIST)"
    lists = ("$SLURM_JOB_NODELIST", "${SLURM_NODELIST%%,*}", "$(echo $SLURM_JOB_NODELIST | cut -d, -f1)")
    assert_findings(
        *((slurm(f"export MASTER_ADDR={value}", PYTHON), 4, compressed) for value in lists),
        (slurm(f"export MASTER_ADDR={all_names}", PYTHON), 4, "MASTER_ADDR contains the names of all machines"),
        (slurm("export MASTER_ADDR=localhost", PYTHON), 4, f"with MASTER_ADDR=localhost, {itself}"),
        (slurm(f"{PYTHON} --url tcp://127.0.0.1:1"), 4, f"with tcp://127.0.0.1, {itself}"),
        (slurm("srun bash -c 'export MASTER_ADDR=$(hostname); python train.py'"), 4, own),
        (slurm(f"srun bash -c '{C10D.format(1, '`hostname`:1')}'"), 4, own),
        slurm(f'srun bash -c "{C10D.format(1, "$(hostname):1")}"'),
        slurm(f"export MASTER_ADDR={all_names[:-1]} | head -n 1)", PYTHON),
        slurm('export MASTER_ADDR=$(echo $SLURM_NODELIST | sed "s/.*//")', PYTHON),
        slurm("export MASTER_ADDR=localhost", PYTHON, nodes=1),
    )


def test_random_values_that_each_machine_computes():
    found = "each machine computes its own random value"
    values = ("$RANDOM", "$((20000 + RANDOM % 9))", "$(shuf -i 1-9 -n 1)")
    assert_findings(
        *((slurm(f"srun bash -c '{C10D.format(value, 'n1:1')}'"), 4, found) for value in values),
        (f"ID=$RANDOM\n{C10D.format('$ID', 'n1:1')}\n", 2, found),  # the script starts on each machine
        slurm(f"srun {C10D.format('$RANDOM', 'n1:1')}"),
    )
