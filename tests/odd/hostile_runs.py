"""Hostile run folders and exported files: every field, array and file of a good one, replaced by what an attacker may send.

A case is a number. The same number makes the same change to the same base, so that a case that fails can be run alone:

    python -m tests.odd.hostile_runs 1234            run one case (or several), and print what was done and found
    python -m tests.odd.hostile_runs --list          print all cases
    python -m tests.odd.hostile_runs --all --jobs 2  run all cases, and print the failures grouped by symptom
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.odd.hostile_cases import select_fast
from tests.odd.hostile_checks import Result, summarize
from tests.odd.hostile_processes import Workshop, run_parallel, serve


def read_log(path: Path | None) -> list[Result]:
    if path is None or not path.exists():
        return []
    return [Result.from_dict(json.loads(line)) for line in path.read_text().splitlines()]


def keep(results: Iterable[Result], path: Path | None) -> list[Result]:
    """Return results, each of which is written to the log as it comes."""
    found = []
    for result in results:
        found.append(result)
        if path is not None:
            with open(path, "a") as file:
                file.write(json.dumps(result.to_dict()) + "\n")
        bad = sum(bool(r.failures) for r in found)
        if len(found) % 50 == 0:
            print(f"{len(found)} cases, {bad} fail", file=sys.stderr, flush=True)
    return found


def run_by_hand(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.odd.hostile_runs", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", type=int, help="numbers of cases")
    parser.add_argument("--all", action="store_true", help="run all cases")
    parser.add_argument("--every", type=int, default=1, help="of all cases only every so manyth")
    parser.add_argument("--fast", action="store_true", help="run the cases that `make test` runs")
    parser.add_argument("--list", action="store_true", help="print all cases and run none")
    parser.add_argument("--real", action="store_true", help="run real commands in place of forked ones")
    parser.add_argument("--match", default="", help="of the cases only those whose description contains this")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cases")
    parser.add_argument("--seconds", type=float, default=10.0, help="wall time that a command may take")
    parser.add_argument("--log", type=Path, help="append results there as lines of JSON; what it has is not run again")
    parser.add_argument("--serve", type=Path, help="run the cases that are named on standard input, in this folder")
    given = parser.parse_args(args)
    if given.serve:
        serve(given.serve, given.seconds)
        return 0
    known = read_log(given.log)
    with tempfile.TemporaryDirectory() as folder:
        if given.jobs > 1:
            results = run_parallel(Path(folder), given.jobs, given.seconds, given.every, {r.number for r in known})
        else:
            shop = Workshop(Path(folder), given.seconds)
            if given.list:
                for case in shop.cases:
                    print(case.number, ascii(case.what), *case.commands)
                return 0
            chosen = {case.number for case in shop.cases[:: given.every] if given.match in case.what}
            if not given.all and (given.fast or given.cases):
                chosen &= {*(select_fast(shop.cases) if given.fast else given.cases)}
            elif not given.all and not given.match:
                parser.error("name cases, or --all, --fast, --list or --match")
            numbers = sorted(chosen - {result.number for result in known})
            results = (shop.run(number, real=given.real, verbose=len(numbers) < 10) for number in numbers)
        found = known + keep(results, given.log)
    print(summarize(found, remarks=True))
    return 1 if any(result.failures for result in found) else 0


if __name__ == "__main__":
    if os.environ.get("OMP_NUM_THREADS") != "1":  # read when numpy is imported, and threads must not be forked
        os.execve(sys.executable, sys.orig_argv, os.environ | {"OMP_NUM_THREADS": "1"})
    sys.exit(run_by_hand())
