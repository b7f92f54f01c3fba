"""Results of all benchmarks as a Markdown table.

python benchmarks/table.py                   # reads build/benchmarks, to which the benchmarks write by default
"""

import argparse
import json
from pathlib import Path
from typing import Any

from contest import RESULTS, format_spread


def rows(result: dict[str, Any]) -> list[str]:
    """Returns one table row for each variant with a target or a limit."""
    rankzero, measured = next(iter(result["measured"])), result["measured"]
    found = []
    for name, figures in measured.items():
        if name in result["limits"]:
            target = f"<= {result['limits'][name]:g} {result['unit']}"
            found.append(f"| {result['title']}: {name} | {format_spread(figures)} {result['unit']} | | | {target} |")
        elif name in result["targets"]:
            cost, other_cost, ratio = (
                format_spread(measured[rankzero]),
                format_spread(figures),
                format_spread(result["ratios"][name]),
            )
            target = f"<= {result['targets'][name]:g} x"
            found.append(
                f"| {result['title']}, beside {name} | {cost} {result['unit']} | {other_cost} | {ratio} x | {target} |"
            )
    return found


def main() -> None:
    """Prints the table, and below it the commits, machines and versions of torch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json_dir", type=Path, default=RESULTS)
    results = [json.loads(path.read_text()) for path in sorted(parser.parse_args().json_dir.glob("*.json"))]
    print("| what | ours | the other | ours / the other | wanted |\n|---|---|---|---|---|")
    for result in results:
        print("\n".join(rows(result)))
    for machine in sorted(
        {f"commit {result['commit']}, {result['machine']}, torch {result['torch']}" for result in results}
    ):
        print(f"\n{machine}")


if __name__ == "__main__":
    main()
