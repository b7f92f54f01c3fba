"""Reads the options of `submit` from the command line. Does not import torch."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rankzero.cli.flags import COMMON_FLAGS, TRAINING_FLAGS
from rankzero.cli.foreign_flags import quoted, similar_names
from rankzero.commands.jobs.options import FLAGS, LISTS, SUBMIT_FLAGS, accepted_flags, add_value, host_value, is_queuing
from rankzero.commands.jobs.request import FORMS, JobRequest
from rankzero.commands.jobs.site_file import read_site
from rankzero.messages import RequestError

SWITCHES = ("dry_run", "follow", "help")
"""Flags of `submit` without a value."""

FILES = ("site", "check")
"""Flags of `submit` that name a file, and that are no properties of the job."""

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

_EXTRA = (
    "qos",
    "reservation",
    "exclusive",
    "mem_per_cpu",
    "mem_per_gpu",
    "nodelist",
    "mail_type",
    "gres",
    "gpus",
    "ntasks",
)
"""Options of sbatch that have no flag."""


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
    directive = "#PBS" if {"pbs", "--scheduler=pbs"} & set(tokens) else "#SBATCH"
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("-"):
            positional.append(token)
            continue
        name, equals, text = ("help", "", "") if token == "-h" else token.removeprefix("--").partition("=")
        if name in SWITCHES and token.startswith(("--", "-h")):
            if equals:
                raise RequestError(token, "this flag has no value", f"--{name}")
            switches.add(name)
            continue
        if not token.startswith("--") or name not in (*FLAGS, *FILES):
            raise _unknown_flag(token.split("=")[0], text if equals else next(iter(tokens), ""), directive)
        if not equals:
            if not tokens or tokens[0].startswith("--"):
                raise RequestError(f"--{name}", "it has no value", f"--{name}=VALUE")
            text = tokens.pop(0)
        if name in FLAGS:
            add_value(values, FLAGS[name], text)
        else:
            files[name] = text
    return CommandLine(values, frozenset(switches), **files, positional=positional, arguments=arguments)


def job_request(command_line: CommandLine) -> JobRequest:
    """Returns the requested job.

    Raises:
        RequestError: A required flag is missing, or flags contradict each other or the scheduler.
    """
    site, given = read_site(command_line.site), command_line.values
    scheduler = given.get("scheduler") or site.get("scheduler")
    if scheduler is None:
        names = ", ".join(FORMS)
        raise RequestError("a job without --scheduler", f"the schedulers are {names}", "--scheduler slurm")
    if scheduler == "pbs":
        _check_pbs({**site, **given})
    if "name" not in given:
        raise RequestError(
            "a job without --name", "status, log, stop and resume find a job by its name", "--name my-run"
        )
    accepted = accepted_flags(scheduler)
    for name in given:
        if name not in accepted:
            raise RequestError(
                f"--{name} with --scheduler {scheduler}",
                f"{scheduler} has no such option",
                "--extra LINE, with an option of the scheduler" if is_queuing(scheduler) else f"leave --{name} out",
            )
    if "hosts" in given or "hostfile" in given:
        site = {name: value for name, value in site.items() if name not in ("hosts", "hostfile")}
    values = {name: value for name, value in {**site, **given}.items() if name in accepted}
    for name in LISTS:
        if name in accepted and name != "hosts" and (both := (*site.get(name, ()), *given.get(name, ()))):
            values[name] = both
    if "form" in values and values["form"] not in FORMS[scheduler]:
        if "form" in given:
            forms = FORMS[scheduler]
            raise RequestError(
                f"--form {values['form']} with --scheduler {scheduler}",
                f"its forms are {', '.join(forms)}" if forms else f"{scheduler} has only one form",
                f"--form {forms[0]}" if forms else "leave --form out",
            )
        del values["form"]
    values.setdefault("form", next(iter(FORMS[scheduler]), None))
    return _with_hosts(
        JobRequest(**{**values, "scheduler": scheduler, "arguments": tuple(command_line.arguments or ())}),
        "nodes" in given,
    )


def _check_pbs(values: Mapping[str, Any]) -> None:
    """Raises an error for values that only Slurm accepts."""
    array, constraint = values.get("array"), values.get("constraint")
    if array and not re.fullmatch(r"[0-9]+-[0-9]+(:[0-9]+)?", array):
        raise RequestError(f"--array {array}", "PBS accepts a range with an optional step", "--array 0-3")
    if constraint and not re.fullmatch(r"[^=\s:]+=[^=:]+(:[^=\s:]+=[^=:]+)*", constraint):
        raise RequestError(f"--constraint {constraint}", "PBS accepts name=value", "--constraint gpu_type=a100")


def _with_hosts(request: JobRequest, nodes_given: bool) -> JobRequest:
    """Returns the request with the machines of `--hostfile`, and with as many nodes as machines if none were given."""
    if is_queuing(request.scheduler):
        return request
    hosts = request.hosts
    if request.hostfile is not None:
        if hosts:
            raise RequestError("--hosts and --hostfile", "both list machines", "leave one of them out")
        hosts = hosts_in(Path(request.hostfile))
    nodes = request.nodes if nodes_given or not hosts else max(request.nodes, len(hosts))
    flag = "--hostfile" if request.hostfile else "--hosts"
    if request.scheduler == "local" and nodes > 1:
        raise RequestError(
            f"--nodes {nodes} with --scheduler local", "it is one machine", "--scheduler ssh --hosts n1,n2"
        )
    if len(hosts) < nodes and (nodes > 1 or request.scheduler == "ssh"):
        found = (
            f"{flag} lists {len(hosts)}: {', '.join(hosts)}"
            if hosts
            else f"{request.scheduler} does not choose machines"
        )
        names = ",".join(f"n{i + 1}" for i in range(nodes))
        raise RequestError(f"{nodes} machines (--nodes {nodes})", found, f"--hosts {names}")
    if request.scheduler in ("docker", "apptainer") and request.image is None:
        raise RequestError(f"--scheduler {request.scheduler}", "the container image is missing", "--image IMAGE")
    return replace(request, hosts=hosts[:nodes], nodes=nodes)


def hosts_in(file: Path) -> tuple[str, ...]:
    """Returns the machines that a host file of mpirun names, in order.

    Raises:
        RequestError: The file cannot be read, names no machine, or has an invalid name.
    """
    try:
        lines = [line.partition("#")[0].split() for line in file.read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise RequestError(f"--hostfile {file}", f"cannot read this file: {reason}", "--hosts n1,n2") from None
    names = dict.fromkeys(words[0].partition(":")[0] for words in lines if words)
    if not names:
        raise RequestError(f"--hostfile {file}", "it names no machine", "--hosts n1,n2")
    try:
        return tuple(host_value(name) for name in names)
    except ValueError:
        raise RequestError(f"--hostfile {file}", "a line does not begin with a host name", "n1 slots=4") from None


def _unknown_flag(typed: str, value: str, directive: str) -> RequestError:
    """Returns the error for a flag that does not exist.

    Args:
        typed: The flag.
        value: Its value, if any.
        directive: How a line with an option of the scheduler begins.
    """
    name = typed.lstrip("-").replace("-", "_")
    legal = (*(flag.name for flag in SUBMIT_FLAGS), *FILES, *SWITCHES)
    listing = f"the flags are {', '.join(f'--{flag}' for flag in legal)}"
    if name in _EXTRA:
        option = f"--{name.replace('_', '-')}={value or 'VALUE'}" if directive == "#SBATCH" else "OPTION"
        line = f"{directive} {option}"
        return RequestError(typed, f"there is no flag of that name; {listing}", f"--extra {shlex.quote(line)}")
    same = next((flag for flag, names in _OTHER_NAMES.items() if name in names.split()), None)
    if name not in legal and same is None and name.split(".")[0] in _FIT_NAMES:
        return RequestError(typed, f"a flag of fit.py comes after --; {listing}", f"-- {typed} {quoted(value)}")
    instead = name if name in (*FLAGS, *legal) else same or next(iter(similar_names(name, legal)), None)
    value_text = f" {quoted(value)}" if value and not value.startswith("-") and instead not in SWITCHES else ""
    return RequestError(
        f"{typed}{value_text}",
        f"there is no flag of that name; {listing}",
        f"--{instead}{value_text}" if instead else "python launch/submit.py --help",
    )


_FIT_NAMES = {
    "model",
    "data",
    "trainer",
    "optimizer",
    "lr_scheduler",
    "config",
    *(name for flag in (*COMMON_FLAGS, *TRAINING_FLAGS) for name in (flag.name, *flag.aliases)),
}
"""Names of flags of fit.py."""
