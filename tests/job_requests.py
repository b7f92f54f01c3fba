"""What the tests of the command line and of the site file of `submit` share."""

from rankzero.commands.jobs.request.combined import job_request
from rankzero.commands.jobs.request.command_line import parse
from running import refusal_of

SLURM = ("--scheduler", "slurm", "--name", "x")
MPIRUN = ("--scheduler", "mpirun", "--name", "x")


def request(*tokens):
    """Returns the job that a command line requests."""
    return job_request(parse(tokens))


def refusal(*tokens):
    """Returns the three parts of the error that a command line gives."""
    error = refusal_of(request, *tokens)
    return error.asked, error.found, error.instead
