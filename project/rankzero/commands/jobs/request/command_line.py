"""Reads the options of `submit` from the command line. Does not import torch."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rankzero.cli.flags.table import flags_of
from rankzero.commands.jobs.request.options import FLAGS, SUBMIT_FLAGS, add_value, is_queuing
from rankzero.messages import RequestError, quoted, similar_names

SWITCHES = ("dry_run", "follow", "validate", "help")
"""Flags of `submit` without a value."""

FILES = ("site", "check")
"""Flags of `submit` that name a file and do not describe the job."""

_OTHER_NAMES = {
    "name": "job_name J",
    "devices": "ntasks_per_node nproc_per_node ppn mpiprocs",
    "cpus_per_device": "cpus_per_task c ncpus",
    "memory": "mem",
    "time": "walltime t time_limit",
    "partition": "p q",
    "account": "A",
    "exclude": "x",
    "mail": "mail_user M",
    "dependency": "d depend",
    "hosts": "host H hostlist w",
    "modules": "module",
    "image": "container",
    "nodes": "N nnodes num_nodes",
}
"""Flag -> names of sbatch, qsub and mpirun for the same."""

_EXTRA = ("qos", "reservation", "exclusive", "mem_per_cpu", "mem_per_gpu", "nodelist", "mail_type", "ntasks")
"""Options of sbatch that have no flag."""

_GPUS = ("gpus", "gres", "gpus_per_node", "gpus_per_task", "G", "ngpus", "gpus_per_device")
"""Names of sbatch and qsub for a number of GPUs."""


class CommandLine(NamedTuple):
    """A parsed command line of `submit`.

    Args:
        values: Flag -> its value; flags of `LISTS` have a tuple of values.
        switches: The given flags without a value.
        site: The value of `--site`; None without the flag.
        check: The value of `--check`; None without the flag.
        positional: Arguments without a flag.
        arguments: The arguments after `--`; None without `--`.
    """

    values: Mapping[str, Any]
    switches: frozenset[str]
    site: str | None
    check: str | None
    positional: Sequence[str]
    arguments: Sequence[str] | None


def parse(tokens: Sequence[str]) -> CommandLine:
    """Parses a command line.

    Raises:
        RequestError: A flag does not exist, lacks its value, or its value is invalid.
    """
    tokens = list(tokens)
    arguments = None
    if "--" in tokens:
        arguments = tokens[tokens.index("--") + 1 :]
        tokens = tokens[: tokens.index("--")]
    values: dict[str, Any] = {}
    switches, positional, files = set(), [], dict.fromkeys(FILES)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("-"):
            positional.append(token)
            continue
        name, equals, text = ("help", "", "") if token == "-h" else token.removeprefix("--").partition("=")
        if name in SWITCHES:
            if equals:
                raise RequestError(token, "this flag has no value", f"--{name}")
            switches.add(name)
            continue
        if name not in (*FLAGS, *FILES):
            following = tokens[0] if tokens and not tokens[0].startswith("-") else ""
            raise _unknown_flag(token.split("=")[0], text if equals else following, values.get("scheduler"))
        if not equals:
            if not tokens or tokens[0].startswith("--"):
                raise RequestError(f"--{name}", "it has no value", f"--{name}=VALUE")
            text = tokens.pop(0)
        if name == "gpus_per_device" and re.fullmatch("[0-9]+", text) and text not in ("0", "1"):
            raise _request_for_gpus(f"--{name}", text)
        if name in FLAGS:
            add_value(values, FLAGS[name], text)
        else:
            files[name] = text
    return CommandLine(values, frozenset(switches), **files, positional=positional, arguments=arguments)


def _unknown_flag(typed: str, value: str, scheduler: str | None) -> RequestError:
    """Returns the error for a flag that does not exist.

    Args:
        typed: The flag.
        value: Its value; empty without one.
        scheduler: The scheduler of the job, if a flag before this one names it.
    """
    name = typed.lstrip("-").replace("-", "_")
    if name in _GPUS:
        return _request_for_gpus(typed, value)
    legal = (*(flag.name for flag in SUBMIT_FLAGS), *FILES, *SWITCHES)
    listing = f"the flags are {', '.join(f'--{flag}' for flag in legal)}"
    if name in _EXTRA and (scheduler is None or is_queuing(scheduler)):
        option = f"--{name.replace('_', '-')}" + (f"={value}" if value else "")
        line = "#PBS OPTION" if scheduler == "pbs" else f"#SBATCH {option}"
        return RequestError(typed, f"there is no flag of that name; {listing}", f"--extra {shlex.quote(line)}")
    same = next((flag for flag, names in _OTHER_NAMES.items() if name in names.split()), None)
    if name not in legal and same is None and name.split(".")[0] in _FIT_NAMES:
        return RequestError(typed, f"a flag of fit.py comes after --; {listing}", f"-- {typed} {quoted(value)}")
    instead = name if name in (*FLAGS, *legal) else same or next(iter(similar_names(name, legal)), None)
    value_text = f" {quoted(value)}" if value and instead not in SWITCHES else ""
    return RequestError(
        f"{typed}{value_text}",
        f"there is no flag of that name; {listing}",
        f"--{instead}{value_text}" if instead else "python launch/submit.py --help",
    )


def _request_for_gpus(typed: str, value: str) -> RequestError:
    """Returns the error for a request of several GPUs; there is a process for each."""
    count = (re.findall(r"[1-9][0-9]*$", value) or ["N"])[0]
    found = "each process has one GPU; --devices is the number of processes per machine"
    devices = "" if count == "1" else f"--devices {count} "
    return RequestError(f"{typed} {value}".rstrip(), found, f"{devices}--gpus_per_device 1")


_FIT_NAMES = {
    "model",
    "data",
    "trainer",
    "optimizer",
    "lr_scheduler",
    "config",
    *(name for flag in flags_of("fit") for name in (flag.name, *flag.aliases)),
}
"""Names of flags of fit.py."""
