"""The verbs. tyro lives here and nowhere else; torch is imported only once a verb has understood its arguments."""

import os
import sys
from collections.abc import Callable, Sequence

from longtail import __version__
from longtail.cli import arguments, manual, used, verbs
from longtail.cli.streams import STANDARD_OUTPUT, discard_output, flush_output, guard_streams
from longtail.config.migrate import migrate_flags
from longtail.deprecated import REMOVAL
from longtail.errors import RankError, RunError, UserError, disk_full_text, error_text, unknown_name
from longtail.progress import is_main_process
from longtail.text import escape_nonprintable
from longtail.torchrun import read_world

LONGEST_ERROR = 2_000  # characters of an error message
TRACEBACK = "LONGTAIL_TRACEBACK"
"""If this environment variable is set, an unexpected exception is shown with its traceback."""
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
    """Run a command and return its exit code; an error that the user can fix is one line on standard error."""
    args = list(sys.argv[1:] if args is None else args)
    with guard_streams():
        try:
            return run(args)
        except UserError as error:
            if reports(error):
                complain(" ".join(str(error).split()), manual.helpful(error))
            return RunError.exit_code if disk_full_text(error) else error.exit_code
        except KeyboardInterrupt:
            complain("interrupted")
            return 130
        except BrokenPipeError:  # `longtail recipes | head`
            discard_output()
            return 141
        except MemoryError:
            less = "leave images on disk (--data.load stream), or lower --data.image_size or --train.batch_size"
            complain(f"not enough memory: {less}")
            return 1
        except OSError as error:
            complain(describe_system_error(error))
            if error.filename == STANDARD_OUTPUT:
                discard_output()
            return 1
        except Exception as error:
            problem = describe_bad_name(error) if isinstance(error, ValueError) else ""
            if not problem and os.environ.get(TRACEBACK):
                raise
            complain(problem or describe_bug(error))
            return 2 if problem else 1


def run(args: list[str]) -> int:
    """Run a command, and write all of its output."""
    try:
        code = dispatch(args)
    except SystemExit:  # --help
        flush_output()
        raise
    flush_output()
    return code


def complain(message: str, more: str = "") -> None:
    """Print an error in one line on standard error; values of a file from somebody else may be very long, and are cut."""
    message = message if len(message) <= LONGEST_ERROR else f"{message[:LONGEST_ERROR]}…"
    print(f"longtail: {escape_nonprintable(message)}{more}", file=sys.stderr)


def reports(error: UserError) -> bool:
    """Return whether this process prints the error: among several processes on a machine the first one does."""
    try:
        return is_main_process() or isinstance(error, RankError)
    except UserError:  # the variables that say which process this is are themselves wrong
        return True


def describe_system_error(error: OSError) -> str:
    """Return one line that names the file and the reason that the system gives."""
    if error.filename == STANDARD_OUTPUT:
        fix = "free some space" if disk_full_text(error) else "redirect it to a file, or to /dev/null"
        return f"cannot write to {STANDARD_OUTPUT} ({error_text(error)}): {fix}"
    if error.filename is None:
        return f"a file cannot be read or written ({error_text(error)}): check the disk"
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else error.filename
    return f"cannot use {name} ({error_text(error)}): check its path, its permissions and the disk"


def describe_bug(error: Exception) -> str:
    """Return one line about an exception that no part of the package expects."""
    reason = " ".join(str(error).split())[:200]
    return f"internal error ({type(error).__name__}: {reason}): please report it; {TRACEBACK}=1 shows where it happened"


def describe_bad_name(error: ValueError) -> str:
    """Return one line about a string that cannot be the name of a file; an empty string for all other errors."""
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:100]!r} cannot be a name of a file or a class here ({error.reason}): rename it"
    return "a path contains a NUL character: remove it" if "embedded null" in str(error) else ""


def dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        return 0
    if args[0] == "--version":
        print(f"longtail {__version__}")
        return 0
    if args[0] not in VERBS:
        raise unknown_name("command", args[0], VERBS)
    check_working_directory()
    if read_world().size > 1 and args[0] != "train":
        raise UserError(
            f"torchrun is for `longtail train`: run `longtail {args[0]}` without it, or unset WORLD_SIZE",
            kind="unsupported",
        )
    rest, renamed = migrate_flags(args[1:])
    for old, new in renamed.items():
        print(f"longtail: {old} was renamed to {new}; {REMOVAL}", file=sys.stderr)
    return VERBS[args[0]][1](rest) or 0


def check_working_directory() -> None:
    """Raise a UserError if the working directory was deleted: relative paths have no meaning there."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"the working directory cannot be used ({error_text(error)}): change to another one", kind="missing-file"
        ) from error


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
