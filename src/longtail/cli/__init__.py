"""The command line.

Only this package imports tyro. torch is imported after the arguments are parsed, so that help and errors are fast.
"""

import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence

from longtail import __version__
from longtail.cli import cache, compare, data, distill, docs, paper, predict, report, train
from longtail.cli.console import STANDARD_OUTPUT, discard_output, flush_output, guard_streams, print_messages
from longtail.cli.help import WIDTH as HELP_WIDTH
from longtail.cli.help import is_help, make_help
from longtail.cli.parse import expand_short_flags
from longtail.config.migrate import migrate_flags
from longtail.deprecated import REMOVAL
from longtail.errors import RankError, RunError, UserError, disk_full_text, error_text, unknown_name
from longtail.progress import is_local_main, terminal_width, wrap_line
from longtail.text import escape_nonprintable
from longtail.torchrun import read_world

MAX_ERROR_LENGTH = 2_000  # characters
TRACEBACK = "LONGTAIL_TRACEBACK"
"""If this environment variable is set, an unexpected exception is shown with its traceback."""
COMMANDS: dict[str, tuple[type, Callable[[list[str]], int | None]]] = {
    "demo": (train.Demo, train.run_demo),
    "recipes": (paper.Recipes, paper.run_recipes),
    "train": (train.Train, train.run_train),
    "eval": (train.Eval, train.run_eval),
    "table": (report.Table, report.run_table),
    "report": (report.Report, report.run_report),
    "figure": (report.Figure, report.run_figure),
    "watch": (report.Watch, report.run_watch),
    "data": (data.Data, data.run_data),
    "compare": (compare.Compare, compare.run_compare),
    "distill": (distill.Distill, distill.run_distill),
    "reproduce": (paper.Reproduce, paper.run_reproduce),
    "theory": (paper.Theory, paper.run_theory),
    "predict": (predict.Predict, predict.run_predict),
    "export": (predict.Export, predict.run_export),
    "cache": (cache.Cache, cache.run_cache),
    "docs": (docs.Docs, docs.run_docs),
}
"""The dataclass of the arguments of each command, and the function that runs it and may return an exit code."""
SUBCOMMANDS = {"data": data.DATA_COMMANDS, "cache": cache.CACHE_COMMANDS}
"""The same for commands that have subcommands."""
COMMAND_GROUPS = {
    "Commands": ("train", "compare", "predict", "export", "distill", "report", "data", "demo", "cache"),
    "Research": ("reproduce", "recipes", "theory", "figure", "table", "eval", "watch", "docs"),
}
"""The groups and the order in which `longtail --help` lists the commands that exist."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Errors are printed in one line on standard error.

    Args:
        args: The arguments; None: those of the process.
    """
    args = list(sys.argv[1:] if args is None else args)
    with guard_streams():
        try:
            return run(args)
        except UserError as error:
            if should_print(error):
                print_error(" ".join(str(error).split()), docs.suggest_page(error))
            return RunError.exit_code if disk_full_text(error) else error.exit_code
        except KeyboardInterrupt:
            print_error("interrupted")
            return 130
        except BrokenPipeError:  # `longtail recipes | head`
            discard_output()
            return 141
        except MemoryError:
            advice = "read images from disk (--data.load stream), or lower --data.image_size or --train.batch_size"
            print_error(f"out of memory: {advice}")
            return 1
        except OSError as error:
            print_error(describe_system_error(error))
            if error.filename == STANDARD_OUTPUT:
                discard_output()
            return 1
        except Exception as error:
            problem = describe_bad_name(error) if isinstance(error, ValueError) else ""
            if not problem and os.environ.get(TRACEBACK):
                raise
            print_error(problem or describe_bug(error))
            return 2 if problem else 1


def run(args: list[str]) -> int:
    """Run a command, flush its output, and return its exit code. Errors are raised."""
    with print_messages():
        try:
            code = dispatch(args)
        except SystemExit:
            flush_output()
            raise
    flush_output()
    return code


def print_error(message: str, suffix: str = "") -> None:
    """Print an error in one line on standard error, wrapped on a terminal.

    Long messages, for example with values from a file, are cut.
    """
    message = message if len(message) <= MAX_ERROR_LENGTH else f"{message[:MAX_ERROR_LENGTH]}…"
    print(
        wrap_line(f"longtail: {escape_nonprintable(message)}{suffix}", terminal_width(is_error=True)), file=sys.stderr
    )


def should_print(error: UserError) -> bool:
    """Return whether this process prints the error. Of several processes on a machine, only the first one does."""
    try:
        return is_local_main() or isinstance(error, RankError)
    except UserError:  # the environment variables of torchrun are invalid
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
    """Return one line about an unexpected exception."""
    reason = " ".join(str(error).split())[:200]
    return f"internal error ({type(error).__name__}: {reason}): please report it; {TRACEBACK}=1 shows the traceback"


def describe_bad_name(error: ValueError) -> str:
    """Return one line about a string that is not a valid file name; an empty string for other errors."""
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:100]!r} is not a valid name of a file or class ({error.reason}): rename it"
    return "a path contains a NUL character: remove it" if "embedded null" in str(error) else ""


def dispatch(args: list[str]) -> int:
    """Run the command that is named by the first argument, and return its exit code."""
    if not args or is_help(args[:1]):
        print(overview())
        return 0
    if args[0] == "--version":
        print(f"longtail {__version__}")
        return 0
    if args[0] not in COMMANDS:
        raise unknown_name("command", args[0], COMMANDS)
    require_working_directory()
    if read_world().size > 1 and args[0] != "train":
        raise UserError(
            f"torchrun is only supported for `longtail train`: run `longtail {args[0]}` without it, or unset WORLD_SIZE",
            kind="unsupported",
        )
    rest, renamed = migrate_flags(args[1:])
    for old, new in renamed.items():
        print(f"longtail: {old} was renamed to {new}; {REMOVAL}", file=sys.stderr)
    name, (kind, run_command) = args[0], COMMANDS[args[0]]
    subcommands = SUBCOMMANDS.get(name, {})
    if rest and not is_help(rest[:1]) and subcommands:
        if rest[0] not in subcommands:
            raise unknown_name("command", f"{name} {rest[0]}", [f"{name} {subcommand}" for subcommand in subcommands])
        kind, run_command = subcommands[rest[0]]
        name, rest, subcommands = f"{name} {rest[0]}", rest[1:], {}
    rest = expand_short_flags(kind, rest)
    if is_help(rest):
        print(make_help(name, kind, rest, {key: arguments for key, (arguments, _) in subcommands.items()}))
        return 0
    return run_command(rest) or 0


def require_working_directory() -> None:
    """Raise a UserError if the working directory was deleted, because relative paths cannot be resolved then."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"the working directory cannot be used ({error_text(error)}): change to another one", kind="missing-file"
        ) from error


def overview() -> str:
    """Return the text of `longtail --help`."""
    lines = ["longtail: image recognition on data with a few frequent and many rare classes"]
    for group, names in COMMAND_GROUPS.items():
        lines += ["", f"{group}:"]
        for name in filter(COMMANDS.__contains__, names):
            whole = (COMMANDS[name][0].__doc__ or "").splitlines()[0]
            main_part = re.split(r":|,(?= (?:and|as|in|with)\b)", whole)[0].removesuffix(".")
            summary = textwrap.wrap(main_part, HELP_WIDTH - 14)
            lines += [f"  {name if row == 0 else '':10}  {line}" for row, line in enumerate(summary)]
    return "\n".join(
        [
            *lines,
            "",
            "Start with `longtail demo`, or with your images: `longtail train FOLDER`.",
            "`longtail COMMAND --help` describes a command; --help-all lists all its options.",
        ]
    )


def console_script() -> None:
    """Run the command line and exit; the entry point of the `longtail` command."""
    sys.exit(main())
