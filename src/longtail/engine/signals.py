"""Handling of Ctrl-C, SIGTERM and SIGHUP between two steps."""

import contextlib
import os
import signal
import threading
from types import FrameType

from longtail.distributed import is_main_process


class StopSignals:
    """A context that records signals in `signum`. The loop then stops after the current step; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __enter__(self) -> "StopSignals":
        # Python handles signals in the main thread only; in other threads nothing changes.
        main = threading.current_thread() is threading.main_thread()
        self.before = {s: signal.signal(s, self._record) for s in handled_signals()} if main else {}
        return self

    def _record(self, signum: int, frame: FrameType | None) -> None:
        if self.signum == signal.SIGINT == signum:
            raise KeyboardInterrupt
        self.signum = signum
        if is_main_process():
            with contextlib.suppress(OSError):
                os.write(
                    2, b"\nstopping after this step, to save (Ctrl-C again: at once, keeping the last checkpoint)\n"
                )

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)


def handled_signals() -> list[signal.Signals]:
    """Return the signals at which training saves and stops.

    SIGHUP, which the system sends when the terminal is closed, is one of them unless it is ignored, as `nohup` asks for.
    """
    found = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found
