"""Detects the launcher of this process from environment variables, most specific first."""

import os
from collections.abc import Mapping
from contextlib import suppress

from rankzero.distributed.environments.launch import Launch, RequestedWorld, Variables, folder_name
from rankzero.distributed.environments.launchers import LAUNCHERS, env, local, mpi, pbs, slurm, torchrun
from rankzero.messages import RequestError

SHOWN_VARIABLES = (
    *env.VARIABLES,
    *(name for launcher in LAUNCHERS.values() for name in launcher.shown_variables if name not in env.VARIABLES),
)
"""Variables that the error about an incomplete launch shows, in this order."""


def detect(requested: RequestedWorld | None = None, environ: Mapping[str, str] | None = None) -> Launch:
    """Detects the launcher and reads its variables.

    Args:
        requested: The requested processes. With launcher `auto`, the environment variables decide.
        environ: The environment variables; `os.environ` by default.

    Raises:
        RequestError: The variables are incomplete or contradictory, the requested launcher's variables are not set,
            launchers are nested in an unsupported way, or a job for several processes has started only this one.
    """
    environ, requested = os.environ if environ is None else environ, requested or RequestedWorld()
    detected = None
    try:
        detected, variables = _find_launcher(requested.launcher, environ), Variables(environ)
        if detected in ("env", None) and (joined := local.one_per_machine(variables, requested)):
            detected, launch = None, local.manual_launch(variables, joined)
        elif detected is None:
            launch = _direct_launch(environ, requested)
        else:
            variables = Variables(environ)
            launch = LAUNCHERS[detected].read(variables, requested)
            job_id = folder_name(launch.job_id)
            launch = launch._replace(
                launcher=detected, externally_created=True, variables=variables.recorded, job_id=job_id
            )
            if launch.world_size == 1:  # alone, so the missing positions are known
                rank = launch.rank or 0
                launch = launch._replace(rank=rank, local_rank=0, local_world_size=1, num_nodes=1, node_rank=0)
        _check_ranks(launch)
    except RequestError:
        raise
    except (KeyError, ValueError) as error:
        launcher = detected or ("pbs" if "PBS_JOBID" in environ else "local")
        raise _incomplete_launch_error(launcher, error, Variables(environ)) from None
    if detected is None:
        return launch
    _check_nesting(launch, environ)
    torchrun.check_elastic(launch)
    if requested.node_rank not in (None, launch.node_rank) and launch.node_rank is not None and detected != "local":
        raise RequestError(
            f"--node_rank {requested.node_rank}",
            f"{launch.launcher} started this process on node {launch.node_rank} ({launch.evidence})",
            "the same command without --node_rank, which is for processes that no launcher starts",
        )
    return launch


def _find_launcher(requested: str, environ: Mapping[str, str]) -> str | None:
    """Returns the most specific launcher whose variables are set; None without one."""
    for name, launcher in LAUNCHERS.items():
        if (requested in ("auto", name) or name == "local") and launcher.found(Variables(environ)):
            return name
    if requested in ("auto", "local"):
        return None
    raise RequestError(
        f"--launcher {requested}",
        f"none of its variables is set, so this process was not started by {requested}",
        f"{LAUNCHERS[requested].command_for()}, or omit --launcher",
    )


def _direct_launch(environ: Mapping[str, str], requested: RequestedWorld) -> Launch:
    """Returns the launch of a process that the user started directly: alone, joined by hand, or in a job script."""
    variables, is_explicit = Variables(environ), requested.launcher == "local"
    if is_explicit:
        _refuse_separate_runs(environ, requested)
    if requested.node_rank is not None or (requested.address and (requested.nodes or 1) > 1):
        return local.manual_launch(variables, requested)
    for module in (slurm, pbs):
        if allocation := module.allocation(variables):
            _refuse_single_process(allocation, requested, is_explicit)
            return Launch(evidence=f"{allocation.evidence}: no task has been started", variables=variables.recorded)
    if (nodes := requested.nodes or 1) > 1:
        devices = requested.devices or "D"
        raise RequestError(
            f"--nodes {nodes}",
            "one process on one machine; no launcher's variables are set",
            f"{LAUNCHERS['slurm'].command_for(nodes, devices)}\n"
            f"or torchrun --nnodes {nodes} --nproc-per-node {devices} ... launch/fit.py ... on each machine\n"
            "or the same command on each machine with --node_rank 0 (then 1, ...) --master_addr HOST "
            "--master_port PORT",
        )
    return Launch(evidence="--launcher local" if is_explicit else Launch().evidence, variables=variables.recorded)


def _refuse_single_process(allocation: Launch, requested: RequestedWorld, is_explicit: bool) -> None:
    """Refuses to train in one process in an allocation for several, which usually means a forgotten `srun`."""
    name, nodes, tasks = allocation.launcher, allocation.num_nodes or 1, allocation.world_size
    # In PBS's node file, a line may represent a core instead of a process; a Slurm task is always a process.
    needs_launcher = nodes > 1 or (requested.nodes or 1) > 1 or (name == "slurm" and tasks > 1)
    if not needs_launcher or (is_explicit and (requested.nodes or 1) == 1):
        return
    nodes, devices = requested.nodes or nodes, requested.devices or max(tasks // nodes, 1)
    raise RequestError(
        f"python launch/fit.py in a job of {allocation.num_nodes} nodes and {tasks} tasks",
        f"one process; no task has been started ({allocation.evidence})",
        f"{LAUNCHERS[name].command_for(nodes, devices)}\nor, for processes on this machine only, --launcher local",
    )


def _refuse_separate_runs(environ: Mapping[str, str], requested: RequestedWorld) -> None:
    """Refuses `--launcher local` in one of several tasks, because each task would start a separate run."""
    for name in LAUNCHERS:
        outer = None if name == "local" else _outer_launch(name, environ)
        if outer and not (outer.world_size == outer.num_nodes == requested.nodes and requested.node_rank is not None):
            raise RequestError(
                "--launcher local",
                f"{outer.world_size} processes that {name} started; each would start a separate run",
                "the same command without --launcher local, or with one task",
            )


def _outer_launch(name: str, environ: Mapping[str, str]) -> Launch | None:
    """Returns the launch of several processes that a launcher's variables describe; None if they do not."""
    with suppress(KeyError, ValueError):
        if LAUNCHERS[name].found(Variables(environ)):
            launch = LAUNCHERS[name].read(Variables(environ), RequestedWorld(address="anywhere", port=1))
            return None if launch.world_size == 1 else launch
    return None


def _check_ranks(launch: Launch) -> None:
    """Raises a ValueError for an impossible rank, such as rank 4 of 4."""
    for name, index, count in (
        ("rank", launch.rank, launch.world_size),
        ("local rank", launch.local_rank, launch.local_world_size),
        ("node rank", launch.node_rank, launch.num_nodes),
    ):
        if index is not None and count is not None and index >= count:
            raise ValueError(f"{name} {index} is not below {count}, the number of {name}s")


def _check_nesting(launch: Launch, environ: Mapping[str, str]) -> None:
    """Refuses a launcher that runs in each task of another one; allows one torchrun per node if all form one world."""
    outer_launchers = {
        "torchrun": [launcher.name for launcher in LAUNCHERS.values() if launcher.one_per_node],
        "mpi": ("slurm",) if mpi.runs_within_step(Variables(environ)) else (),
    }.get(launch.launcher, ())
    for name in outer_launchers:
        outer = _outer_launch(name, environ)
        is_one_per_node = launch.launcher == "torchrun" and outer and (outer.local_world_size or 1) == 1
        if outer is None or (is_one_per_node and (launch.num_nodes != 1 or launch.elastic)):
            continue
        raise RequestError(
            f"{launch.launcher} within {name} ({launch.evidence}; {outer.evidence})",
            f"a {launch.launcher} in each of {outer.world_size} tasks ({outer.local_world_size or 1} on this machine), "
            "so each would start a separate run",
            f"{LAUNCHERS[name].one_per_node} torchrun --nnodes N --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
            f"--rdzv-id JOB launch/fit.py ...\nor {name} alone: {LAUNCHERS[name].command_for()}",
        )


def _incomplete_launch_error(launcher: str, error: KeyError | ValueError, variables: Variables) -> RequestError:
    """Returns the error for a launcher whose variables are incomplete or invalid."""
    missing = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
    if launcher == "local":
        flags = "--nodes N --node_rank R --master_addr HOST --master_port PORT"
        node_ranks = "where R is 0 on HOST, 1 on the next machine, and so on"
        instead = f"on each machine the same command with {flags}, {node_ranks}"
        return RequestError("to start processes without a launcher", missing, instead)
    found = {name: variables.text(name) for name in SHOWN_VARIABLES if name in variables}
    instead = LAUNCHERS[launcher].command_for()
    if missing.startswith("MASTER_ADDR"):
        instead = "--master_addr HOST, where HOST is the machine of rank 0"
    if launcher == "env":
        instead += f"\nor, for a single process: unset {' '.join(name for name in found if name in env.VARIABLES)}"
    settings = " ".join(f"{name}={value}" for name, value in found.items())
    return RequestError(f"to start one of several processes ({launcher}: {settings})", missing, instead)
