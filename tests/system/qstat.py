"""A stand-in for PBS's `qstat -f`, as OpenPBS 23.06 was seen to answer: no PBS can be installed here."""

SHOWN = """\
Job Id: {job}
    Job_Name = t1
    Job_Owner = tester@pbs1
    job_state = {state}
    queue = workq
    ctime = Fri Nov 20 14:47:58 2026
    Rerunable = True
    Resource_List.ncpus = 4
    Resource_List.nodect = 2
    Resource_List.place = scatter
    Resource_List.select = 2:ncpus=2:mpiprocs=2
{more}    run_count = 1
    Variable_List = PBS_O_HOME=/home/tester,BASH_FUNC_module%%=() {{
\teval
    job_state = X
    }}
    Submit_Host = pbs1
"""
"""The form is that of openpbs/openpbs#2541, where a variable holds a function too, and with it lines of any kind."""


def qstat(job: str, stime: str | None = None, walltime: str | None = None, state: str = "R") -> str:
    """A shell script that knows this job alone. `stime` may hold what a shell expands."""
    more = f"    Resource_List.walltime = {walltime}\n" if walltime else ""
    more += f"    stime = {stime}\n" if stime else ""
    shown = SHOWN.format(job=job, state=state, more=more)
    return f'[ "$*" = "-f {job}" ] || {{ echo "qstat: Unknown Job Id $2" >&2; exit 153; }}\ncat <<END\n{shown}END'
