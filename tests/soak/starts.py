"""Starts and ends a small run many times under torchrun, and counts how it left.

python tests/soak/starts.py --count 40 --processes 2
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

SCRIPT = Path(__file__).parents[2] / "launch" / "fit.py"


def left_behind() -> tuple[int, set[int]]:
    """Processes of runs, and ports that anything listens on."""
    processes = psutil.process_iter(["cmdline", "status"])
    running = [p for p in processes if str(SCRIPT) in (p.info["cmdline"] or []) and p.info["status"] != "zombie"]
    ports = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return len(running), ports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(options.processes)]
    command = [*torchrun, str(SCRIPT), "--model", "MLP", "--data", "Toy", "--epochs", "1"]
    _, ports = left_behind()
    codes: Counter[int] = Counter()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, options.count + 1):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            codes[done.returncode] += 1
            if done.returncode:
                print(done.stdout[-2000:], done.stderr[-4000:], flush=True)
            print(f"{number}/{options.count}: exit codes {dict(codes)}", flush=True)
    processes, ports_after = left_behind()
    seconds = (time.monotonic() - begun) / options.count
    print(
        f"{codes[0]} of {options.count} left with 0, {seconds:.1f} s each; "
        f"processes left: {processes}; ports left: {len(ports_after - ports)}"
    )
    return 0 if codes[0] == options.count and not processes and not ports_after - ports else 1


if __name__ == "__main__":
    sys.exit(main())
