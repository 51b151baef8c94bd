"""Processor time of `longtail compare` with several methods, divided by that with one.

    python benchmarks/compare.py FOLDER [--one paco] [--several ce balanced-softmax paco] [--seeds 0 1 2] [--out FILE]

Each command runs in a process of its own with an empty feature cache, one after the other, so that both compute the features.
`cpu` is the processor time of the process in seconds, summed over all threads, which depends less on other work of the machine
than `wall`. `default` is `longtail compare` without `--methods`, with the baselines.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from measure import Row, describe_machine, format_table, save


def run_compare(images: Path, methods: Sequence[str], seeds: Sequence[str]) -> tuple[float, float]:
    """Return processor time and wall time of a comparison in seconds.

    Args:
        images: The folder of images.
        methods: Names of methods; none for the default.
        seeds: The seeds.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--seeds", *seeds, "--out", f"{folder}/out", *(["--methods", *methods] if methods else [])]
        command = [sys.executable, "-m", "longtail", "compare", str(images), "--device", "cpu", *flags]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        environment = os.environ | {"LONGTAIL_CACHE": f"{folder}/cache"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return cpu, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--one", default="paco")
    parser.add_argument("--several", nargs="+", default=["ce", "balanced-softmax", "paco"])
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    for methods in ([args.one], args.several, []):
        cpu, wall = run_compare(args.images, methods, args.seeds)
        ratio = cpu / rows[0]["cpu"] if rows else 1.0
        rows.append({"methods": " ".join(methods) or "default", "cpu": cpu, "wall": wall, "ratio": ratio})
        print(format_table(rows[-1:]), flush=True)
    print(format_table(rows))
    settings = {"where": describe_machine(torch.device("cpu")), "images": args.images.name, "seeds": args.seeds}
    save(args.out, settings | {"rows": rows})


if __name__ == "__main__":
    main()
