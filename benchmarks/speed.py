"""All measurements of speed in one file: `step.py`, `views.py` and `loss.py`; about two minutes on an H200.

    python benchmarks/speed.py [--out results/speed.json] [--plot results/loss.png] [--skip views ...]

Each part is written as soon as it is measured, with its machine, versions, commit ($LONGTAIL_COMMIT if the code is not in a git
repository) and date. Parts that are skipped are not changed in the file.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import loss
import step
import views
from measure import Row, format_table, free_memory, save

from longtail.engine.device import choose_device


def list_parts(device_name: str, compiled: bool, quick: bool) -> dict[str, Callable[[], Row]]:
    """Return the parts; `quick` makes a few calls at small sizes, to test that all of them run."""
    device = choose_device(device_name)
    steps = ("eager", "captured", "compiled", "fused") if compiled else step.STEPS
    if quick:
        return {
            "views": partial(views.measure, device, (1,), 0.2),
            "loss": partial(loss.measure, device, 2**20),
            "step": partial(step.measure, device, ("eager",), (2,), (1,), 1),
        }
    return {
        "views": partial(views.measure, device),
        "loss": partial(loss.measure, device),
        "step": partial(step.measure, device, steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/speed.json"))
    parser.add_argument("--plot", type=Path, help="write a plot of the loss to this file")
    parser.add_argument("--skip", nargs="*", default=(), choices=("views", "loss", "step"))
    parser.add_argument(
        "--compiled", action="store_true", help="measure the compiled step too, which takes half a minute to compile"
    )
    parser.add_argument(
        "--quick", action="store_true", help="make a few calls at small sizes, to check that everything runs"
    )
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    found: Row = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name, measure in list_parts(args.device, args.compiled, args.quick).items():
        if name in args.skip:
            continue
        found[name] = measure()
        save(args.out, found)
        print(f"\n{name}\n{format_table(found[name]['rows'])}\n", flush=True)
        free_memory()
        if args.plot and name == "loss":
            loss.plot(found[name]["rows"], args.plot)


if __name__ == "__main__":
    main()
