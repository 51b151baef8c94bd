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
from pathlib import Path


def run_by_hand(args: list[str] | None = None) -> int:
    from tests.odd.hostile_cases import select_fast
    from tests.odd.hostile_checks import summarize
    from tests.odd.hostile_processes import Workshop, run_parallel, serve

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
    parser.add_argument("--json", type=Path, help="write what was found there")
    parser.add_argument("--serve", type=Path, help="run the cases that are named on standard input, in this folder")
    given = parser.parse_args(args)
    if given.serve:
        serve(given.serve, given.seconds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if given.jobs > 1:
            found = run_parallel(Path(folder), given.jobs, given.seconds, given.every)
        else:
            shop = Workshop(Path(folder), given.seconds)
            chosen = [case for case in shop.cases[:: given.every] if given.match in case.what]
            if not given.all:
                wanted = {*(select_fast(shop.cases) if given.fast else given.cases)}
                chosen = [case for case in chosen if case.number in wanted or (given.match and not wanted)]
            if given.list:
                for case in shop.cases:
                    print(case.number, case.what, *case.commands)
                return 0
            found = [shop.run(case.number, real=given.real, verbose=len(chosen) < 10) for case in chosen]
    if given.json:
        given.json.write_text(json.dumps([result.to_dict() for result in found], indent=1))
    print(summarize(found, remarks=True))
    return 1 if any(result.failures for result in found) else 0


if __name__ == "__main__":
    if os.environ.get("OMP_NUM_THREADS") != "1":  # read when numpy is imported, and threads must not be forked
        os.execve(sys.executable, sys.orig_argv, os.environ | {"OMP_NUM_THREADS": "1"})
    from tests.odd import hostile_runs  # so that there is one copy of the classes above

    sys.exit(hostile_runs.run_by_hand())
