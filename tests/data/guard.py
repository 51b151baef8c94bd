"""Run work on a hostile file in a child process with limited memory and time, so that the test process survives."""

import os
import resource
import signal
import traceback
from collections.abc import Callable
from typing import NamedTuple

from longtail.errors import UserError

SECONDS = 10
MEMORY = 2 * 2**30  # bytes beyond what the process has mapped already


class Outcome(NamedTuple):
    kind: str
    """"done", "UserError", "traceback" or "signal"."""
    text: str
    """The message, the traceback, or the number of the signal; SIGALRM stands for a lack of time."""


def run_guarded(work: Callable[[], object], seconds: int = SECONDS, memory: int = MEMORY) -> Outcome:
    """Run `work` in a child process and return its outcome."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _run_child(work, writer, seconds, memory)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return Outcome("signal", str(os.WTERMSIG(status)))
    kind, _, text = said.partition("\n")
    return Outcome(kind, text)


def _run_child(work: Callable[[], object], writer: int, seconds: int, memory: int) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(6 * seconds)  # wall time, on a machine that may be busy
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
        try:
            work()
            said = "done\n"
        except UserError as error:
            said = f"UserError\n{error}"
        except BaseException:
            said = f"traceback\n{traceback.format_exc()}"
        os.write(writer, said.encode(errors="backslashreplace")[:60_000])
    finally:
        os._exit(0)
