"""Detects the launcher of this process from environment variables, most specific first. Does not import torch."""

import os
from collections.abc import Mapping

from rankzero.distributed.environments.launch import Allocation, Launch, RequestedWorld, Variables
from rankzero.distributed.environments.launchers import LAUNCHERS, env, local, mpi, pbs, slurm, torchrun
from rankzero.messages import RequestError

SHOWN = (
    *env.PLACE,
    *(name for launcher in LAUNCHERS.values() for name in launcher.shown_variables if name not in env.PLACE),
)
"""Variables that the error about an incomplete launch shows, in this order."""


def detect(asked: RequestedWorld | None = None, environ: Mapping[str, str] | None = None) -> Launch:
    """Detects the launcher and reads its variables.

    Args:
        asked: The requested processes. With launcher `auto`, the environment variables decide.
        environ: The environment variables; `os.environ` by default.

    Raises:
        RequestError: The variables are incomplete or contradictory, the requested launcher's variables are not set,
            launchers are nested in an unsupported way, or a job for several processes has started only this one.
    """
    environ, asked = os.environ if environ is None else environ, asked or RequestedWorld()
    found, launcher = None, asked.launcher
    try:
        found = _launcher(launcher, environ)
        if found is None:
            return _without_launcher(launcher, environ, asked)
        launch = LAUNCHERS[found].read(Variables(environ), asked)
        _check_places(launch)
    except RequestError:
        raise
    except (KeyError, ValueError) as error:
        raise _incomplete(found or ("pbs" if "PBS_JOBID" in environ else "local"), error, Variables(environ)) from None
    _check_nesting(launch, environ)
    torchrun.check_elastic(launch)
    if asked.node_rank not in (None, launch.node_rank) and launch.node_rank is not None and found != "local":
        raise RequestError(
            f"--node_rank {asked.node_rank}",
            f"{launch.launcher} says that this is node {launch.node_rank} ({launch.evidence})",
            "the same line without --node_rank, which is for machines that no launcher joins",
        )
    return launch


def _launcher(asked: str, environ: Mapping[str, str]) -> str | None:
    """Returns the most specific launcher whose variables are set; None without one.

    Raises:
        RequestError: A specific launcher was requested, and its variables are not set.
    """
    for name, launcher in LAUNCHERS.items():
        if (asked in ("auto", name) or name == "local") and launcher.found(Variables(environ)):
            return name
    if asked in ("auto", "local"):
        return None
    raise RequestError(
        f"--launcher {asked}",
        f"none of its variables is set, so this process was not started by {asked}",
        f"{LAUNCHERS[asked].line_for()}, or leave --launcher out",
    )


def _without_launcher(launcher: str, environ: Mapping[str, str], asked: RequestedWorld) -> Launch:
    """Returns the launch of a process that the user started directly: alone, joined by hand, or in a job script."""
    if launcher == "local":
        _refuse_several_alone(environ, asked)
    variables = Variables(environ)
    if asked.node_rank is not None or (asked.address and (asked.nodes or 1) > 1):
        launch = local.by_hand(variables, asked)
        _check_places(launch)
        return launch
    for name, module in (("slurm", slurm), ("pbs", pbs)):
        if allocation := module.allocation(variables):
            _refuse_one_of_several(name, allocation, asked, explicit=launcher == "local")
            return Launch(evidence=f"{allocation.evidence}: no task has been started", variables=variables.read)
    if (asked.nodes or 1) > 1:
        raise RequestError(
            f"--nodes {asked.nodes}",
            "one process on one machine; no launcher's variables are set",
            f"srun python launch/fit.py --nodes {asked.nodes} ..., or torchrun --nnodes {asked.nodes} ..., or on each "
            f"machine the same line with --node_rank 0 (then 1, ...) --master_addr HOST --master_port PORT",
        )
    return Launch(evidence="--launcher local" if launcher == "local" else Launch().evidence, variables=variables.read)


def _refuse_one_of_several(name: str, allocation: Allocation, asked: RequestedWorld, explicit: bool) -> None:
    """Refuses to train in one process in an allocation for several, which usually means a forgotten `srun`."""
    nodes, tasks = allocation.nodes, allocation.tasks
    # In PBS's node file, a line may represent a core instead of a process; a Slurm task is always a process.
    several = nodes > 1 or (asked.nodes or 1) > 1 or (name == "slurm" and tasks > 1)
    if not several or (explicit and (asked.nodes or 1) == 1):
        return
    nodes, devices = asked.nodes or nodes, asked.devices or max(tasks // nodes, 1)
    starts = ("slurm",) if name == "slurm" else ("mpi", "pbs")
    start = "\nor ".join(LAUNCHERS[launcher].line_for(nodes, devices) for launcher in starts)
    raise RequestError(
        f"python launch/fit.py in a job of {allocation.nodes} nodes and {tasks} tasks",
        f"one process; no task has been started ({allocation.evidence})",
        f"{start}\nor, for processes on this machine alone, --launcher local",
    )


def _refuse_several_alone(environ: Mapping[str, str], asked: RequestedWorld) -> None:
    """Refuses `--launcher local` in one of several tasks, because each task would start a separate run."""
    for name in LAUNCHERS:
        outer = None if name == "local" else _around(name, environ)
        if outer is None or outer.world_size == 1:
            continue
        joined_by_hand = outer.world_size == outer.num_nodes == asked.nodes and asked.node_rank is not None
        if not joined_by_hand:
            raise RequestError(
                "--launcher local",
                f"{outer.world_size} processes that {name} started; each would start a run of its own",
                "the same line without --launcher local, or with one task",
            )


def _around(name: str, environ: Mapping[str, str]) -> Launch | None:
    """Returns the launch that a launcher's variables describe; None if they are unset or incomplete."""
    try:
        if not LAUNCHERS[name].found(Variables(environ)):
            return None
        launch = LAUNCHERS[name].read(Variables(environ), RequestedWorld(address="anywhere", port=1))
    except (KeyError, ValueError):
        return None
    return launch


def _check_places(launch: Launch) -> None:
    """Raises a ValueError for an impossible rank, such as rank 4 of 4."""
    for name, place, count in (
        ("rank", launch.rank, launch.world_size),
        ("local rank", launch.local_rank, launch.local_world_size),
        ("node rank", launch.node_rank, launch.num_nodes),
    ):
        if place is not None and count is not None and place >= count:
            raise ValueError(f"{name} {place} is not below {count}, the number of them")


def _check_nesting(launch: Launch, environ: Mapping[str, str]) -> None:
    """Refuses a launcher that runs in each task of another one; allows one torchrun per node if all form one world."""
    outside = {
        "torchrun": [launcher.name for launcher in LAUNCHERS.values() if launcher.one_per_node],
        "mpi": ("slurm",) if mpi.runs_within_step(Variables(environ)) else (),
    }.get(launch.launcher, ())
    for name in outside:
        outer = _around(name, environ)
        if outer is None or outer.world_size == 1:
            continue
        one_a_node = launch.launcher == "torchrun" and (outer.local_world_size or 1) == 1
        alone = launch.num_nodes == 1 and not launch.elastic
        if one_a_node and not alone:
            continue
        raise RequestError(
            f"{launch.launcher} within {name} ({launch.evidence}; {outer.evidence})",
            f"a {launch.launcher} in each of {outer.world_size} tasks ({outer.local_world_size or 1} on this machine): "
            "worlds within a world",
            f"{LAUNCHERS[name].one_per_node} torchrun --nnodes N --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
            f"--rdzv-id JOB launch/fit.py ...\nor {name} alone: {LAUNCHERS[name].line_for()}",
        )


def _incomplete(launcher: str, error: KeyError | ValueError, variables: Variables) -> RequestError:
    """Returns the error for a launcher whose variables are incomplete or invalid."""
    missing = f"{error.args[0]} is not given" if isinstance(error, KeyError) else str(error)
    if launcher == "local":
        line = "--nodes N --node_rank R --master_addr HOST --master_port PORT"
        where = "where R is 0 on HOST, 1 on the next, and so on"
        return RequestError("machines that are joined by hand", missing, f"on each the same line with {line}, {where}")
    found = {name: variables.text(name) for name in SHOWN if name in variables}
    instead = LAUNCHERS[launcher].line_for()
    if missing.startswith("MASTER_ADDR"):
        instead = "--master_addr HOST, where HOST is the machine of rank 0"
    if launcher == "env":
        instead += f"\nor, to start alone: unset {' '.join(name for name in found if name in env.PLACE)}"
    said = " ".join(f"{name}={value}" for name, value in found.items())
    return RequestError(f"to be one of several processes ({launcher}: {said})", missing, instead)
