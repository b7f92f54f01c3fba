"""A step of a ResNet-18 with several ranks on one machine: default number of threads compared with fixed numbers.

python benchmarks/threads.py                 # 2 ranks on two cores; takes 5 minutes

By default, Rankzero divides the cores among the ranks. torch's own default gives all cores to each rank.
"""

import os

from contest import Comparison, parser
from resnet_step import PIXELS, rankzero_milliseconds

from rankzero.distributed.process.system import usable_cores

BATCH = 16


def main() -> None:
    """Measures all numbers of threads in turn."""
    flags = parser(__doc__ or "")
    flags.add_argument("--steps", type=int, default=4, help="that are measured")
    flags.add_argument("--processes", type=int, default=2, metavar="N")
    arguments = flags.parse_args()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # a run would treat the caller's values as the user's
        os.environ.pop(name, None)
    processes, steps, cores = arguments.processes, arguments.steps, len(usable_cores())
    share = max(1, cores // processes)
    all_cores, divided_cores = f"OMP_NUM_THREADS={cores}, all cores for each rank", f"OMP_NUM_THREADS={share}"
    Comparison(
        name=f"threads-{processes}",
        title=f"ResNet-18, {PIXELS}x{PIXELS} pixels, {processes} x {BATCH} a step, {processes} ranks on {cores} cores",
        unit="milliseconds a step",
        measure={
            "ours": lambda: rankzero_milliseconds(processes, steps, None, "no", BATCH),
            all_cores: lambda: rankzero_milliseconds(processes, steps, cores, "no", BATCH),
            divided_cores: lambda: rankzero_milliseconds(processes, steps, share, "no", BATCH),
        },
        targets={all_cores: 0.9, divided_cores: 1.03},
    ).run(arguments.pairs, arguments.json_dir)


if __name__ == "__main__":
    main()
