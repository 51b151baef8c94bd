"""The verbs. tyro lives here and nowhere else; torch is imported only once a verb has understood its arguments."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence

from longtail import __version__
from longtail.cli import arguments, manual, used, verbs
from longtail.errors import Alone, RunError, UserError, full_disk, unknown, visible, why
from longtail.progress import speaks

VERBS: dict[str, tuple[type, Callable[[list[str]], int | None]]] = {
    "demo": (arguments.Demo, verbs.run_demo),
    "recipes": (arguments.Recipes, verbs.run_recipes),
    "train": (arguments.Train, verbs.run_train),
    "eval": (arguments.Eval, verbs.run_eval),
    "table": (arguments.TableArgs, verbs.run_table),
    "report": (arguments.ReportArgs, verbs.run_report),
    "figure": (arguments.FigureArgs, verbs.run_figure),
    "watch": (arguments.Watch, verbs.run_watch),
    "data": (arguments.Data, verbs.run_data),
    "compare": (arguments.Compare, verbs.run_compare),
    "reproduce": (arguments.Reproduce, verbs.run_reproduce),
    "theory": (arguments.Theory, verbs.run_theory),
    "predict": (used.Predict, used.run_predict),
    "export": (used.Export, used.run_export),
    "docs": (manual.Docs, manual.run_docs),
}


def main(args: Sequence[str] | None = None) -> int:
    """The command; every error of the user's is one line and an exit code."""
    args = list(sys.argv[1:] if args is None else args)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ± shows ?
    try:
        code = dispatch(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except UserError as error:
        if speaks() or isinstance(error, Alone):
            print("longtail: " + visible(" ".join(str(error).split())) + manual.helpful(error), file=sys.stderr)
        return RunError.exit_code if full_disk(error) else error.exit_code
    except KeyboardInterrupt:
        print("longtail: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `longtail recipes | head`
        close_output()
        return 141
    except MemoryError:
        less = "leave images on disk (--data.load stream), or lower --data.image_size or --train.batch_size"
        print(f"longtail: not enough memory: {less}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is not None:
            raise
        close_output()  # of a file it would have a name
        print(f"longtail: cannot write to standard output ({why(error)}): free some space", file=sys.stderr)
        return 1


def close_output() -> None:
    """What is left to be written goes nowhere: as it ends Python would try once more, and complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        return 0
    if args[0] == "--version":
        print(f"longtail {__version__}")
        return 0
    if args[0] not in VERBS:
        raise unknown("command", args[0], VERBS)
    if args[0] != "train" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(f"torchrun is for `longtail train`: run `longtail {args[0]}` without")
    return VERBS[args[0]][1](args[1:]) or 0


def overview() -> str:
    lines = [f"  {verb:9} {first_line(kind)}" for verb, (kind, _) in VERBS.items()]
    return "\n".join(
        [
            "longtail: image recognition where a few classes have most of the images",
            "",
            *lines,
            "",
            "Start with `longtail demo`; each command explains itself with --help.",
        ]
    )


def first_line(kind: type) -> str:
    return (kind.__doc__ or "").splitlines()[0]


def console_script() -> None:
    sys.exit(main())
