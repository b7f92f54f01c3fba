"""ResNet-18 step on 32x32 pixels, 128 images per process: Rankzero (--fast yes) compared with hand-written loops.

python benchmarks/resnet_step.py             # 1 and 2 processes on two CPU cores; takes 15 minutes
python benchmarks/resnet_step.py --steps 10 --pairs 3 --processes 1

Each variant is measured in separate processes, over all steps but the first, which prepares memory and kernels. The
well-tuned loop is in by_hand/resnet.py: channels_last, bf16 if the processor computes it, gathered batches, DDP's fast
settings. `--compiled` adds the same loop with torch.compile, and Rankzero with `--compile step`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from contest import ROOT, Comparison, parser, run, run_for_json

BATCH, PIXELS = 128, 32
LOOP_SCRIPT = "by_hand/resnet.py"


def rankzero_milliseconds(
    processes: int, steps: int, threads: int | None, fast: str = "yes", batch: int = BATCH, compiled: str = "off"
) -> float:
    """Returns milliseconds per step of a run; if `threads` is None, the run chooses the number of threads."""
    with tempfile.TemporaryDirectory() as folder:
        clock = Path(folder) / "clock.json"
        first = 1 if compiled == "off" else 3  # the second step is compiled
        command = [sys.executable, str(ROOT / "launch/fit.py"), "--model", "ResNet", "--model.depth", "18"]
        command += ["--data", "SyntheticImages", f"--data.image_size={PIXELS}", "--batch_size", str(batch)]
        command += [f"--data.count={(first + steps) * batch * processes}", "--epochs", "1", "--fast", fast]
        command += ["--compile", compiled, "--trainer.callbacks", "clock.StepClock"]
        command += ["--trainer.limit_val_batches", "0", "--accelerator", "cpu", "--devices", str(processes)]
        command += ["--trainer.callbacks.path", str(clock), "--trainer.callbacks.first", str(first), "--root", folder]
        run(command, threads)
        return 1000 * float(json.loads(clock.read_text()))


def loop_milliseconds(processes: int, steps: int, threads: int, *flags: str) -> float:
    """Returns milliseconds per step of a hand-written loop."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable] if processes == 1 else command
    command += [str(ROOT / "benchmarks" / LOOP_SCRIPT), "--steps", str(1 + steps), "--batch_size", str(BATCH), *flags]
    return 1000 * float(run_for_json(command, threads))


def main() -> None:
    """Measures all variants in turn, for each number of processes."""
    flags = parser(__doc__)
    flags.add_argument("--steps", type=int, default=4, help="that are measured")
    flags.add_argument("--processes", type=int, nargs="+", default=[1, 2], metavar="N")
    flags.add_argument("--compiled", action="store_true", help="also measure steps that torch.compile compiles")
    arguments = flags.parse_args()
    for processes in arguments.processes:
        size = (processes, arguments.steps, max(1, (os.cpu_count() or 1) // processes))
        measure = {
            "ours, --fast yes": lambda size=size: rankzero_milliseconds(*size),
            "by hand, well tuned": lambda size=size: loop_milliseconds(*size, "--well_tuned"),
            "by hand, as in a tutorial": lambda size=size: loop_milliseconds(*size),
        }
        if arguments.compiled:
            measure["ours, --compile step"] = lambda size=size: rankzero_milliseconds(*size, compiled="step")
            measure["by hand, well tuned, compiled"] = lambda size=size: loop_milliseconds(
                *size, "--well_tuned", "--compiled"
            )
        Comparison(
            name=f"resnet_step-{processes}",
            title=f"ResNet-18, {PIXELS}x{PIXELS} pixels, {processes} x {BATCH} a step, on {size[2]} threads each",
            unit="milliseconds a step",
            measure=measure,
            targets={"by hand, well tuned": 0.95},
        ).run(arguments.pairs, arguments.json_dir)


if __name__ == "__main__":
    main()
