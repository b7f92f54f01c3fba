"""What the tests of the command line and of the site file of `submit` share."""

import pytest

from rankzero.commands.jobs.request.combined import job_request
from rankzero.commands.jobs.request.command_line import parse
from rankzero.messages import RequestError

SLURM = ("--scheduler", "slurm", "--name", "x")
MPIRUN = ("--scheduler", "mpirun", "--name", "x")


def request(*tokens):
    """Returns the job that a command line requests."""
    return job_request(parse(tokens))


def refusal(*tokens):
    """Returns the three parts of the error that a command line gives."""
    with pytest.raises(RequestError) as error:
        request(*tokens)
    return error.value.asked, error.value.found, error.value.instead
