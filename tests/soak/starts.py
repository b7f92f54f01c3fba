"""Starts a short run many times under a launcher; counts exit codes, leftover processes and leftover ports.

python tests/soak/starts.py --launcher torchrun --count 100 --processes 2
python tests/soak/starts.py --launcher srun --count 50           # needs root; starts a Slurm with two nodes
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # contains the package `system`

from system.slurm import cluster

SCRIPT = Path(__file__).parents[2] / "launch" / "fit.py"
TRAIN = [str(SCRIPT), "--model", "MLP", "--data", "Toy", "--epochs", "1"]


def leftovers() -> tuple[int, set[int]]:
    """Returns the number of processes of runs, and the ports on which any process listens."""
    processes = psutil.process_iter(["cmdline", "status"])
    running = [p for p in processes if str(SCRIPT) in (p.info["cmdline"] or []) and p.info["status"] != "zombie"]
    ports = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return len(running), ports


@contextlib.contextmanager
def launcher(name: str, processes: int, folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yields the command line that starts the run, and its environment variables."""
    if name == "torchrun":
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        yield [torchrun, "--nproc-per-node", str(processes), *TRAIN], dict(os.environ)
        return
    with cluster(folder / "slurm") as environment:
        tasks_per_node = f"--ntasks-per-node={max(processes // 2, 1)}"
        yield ["srun", "--nodes=2", tasks_per_node, sys.executable, *TRAIN], environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=("torchrun", "srun"), default="torchrun")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    codes: Counter[int] = Counter()
    with (
        tempfile.TemporaryDirectory() as name,
        launcher(options.launcher, options.processes, Path(name)) as (command, variables),
    ):
        _, ports = leftovers()
        start = time.monotonic()
        for number in range(1, options.count + 1):
            process = subprocess.run(command, cwd=name, env=variables, capture_output=True, text=True)
            codes[process.returncode] += 1
            if process.returncode:
                print(process.stdout[-2000:], process.stderr[-4000:], flush=True)
            print(f"{number}/{options.count}: exit codes {dict(codes)}", flush=True)
        seconds = (time.monotonic() - start) / options.count
        processes, ports_after = leftovers()
    print(
        f"{options.launcher}: {codes[0]} of {options.count} exited with code 0, {seconds:.1f} s each; "
        f"processes left: {processes}; ports left: {len(ports_after - ports)}"
    )
    return 0 if codes[0] == options.count and not processes and not ports_after - ports else 1


if __name__ == "__main__":
    sys.exit(main())
