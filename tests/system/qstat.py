"""Replacement for PBS's `qstat -f`, with output recorded from OpenPBS 23.06."""

OUTPUT = """\
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
"""Output as in openpbs/openpbs#2541: one variable contains a shell function, and with it arbitrary lines."""


def qstat(job: str, stime: str | None = None, walltime: str | None = None, state: str = "R") -> str:
    """Returns a shell script that knows only this job. `stime` may contain shell expansions."""
    more = f"    Resource_List.walltime = {walltime}\n" if walltime else ""
    more += f"    stime = {stime}\n" if stime else ""
    output = OUTPUT.format(job=job, state=state, more=more)
    return f'[ "$*" = "-f {job}" ] || {{ echo "qstat: Unknown Job Id $2" >&2; exit 153; }}\ncat <<END\n{output}END'
