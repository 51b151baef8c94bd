"""Stopping at Ctrl-C, SIGTERM and SIGHUP between two steps."""

import contextlib
import os
import signal
import threading
from types import FrameType

from longtail.distributed import is_main_process


class StopSignals:
    """A context that records a signal in `signum`. The loop stops after the current step, and at a second Ctrl-C at once."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __enter__(self) -> "StopSignals":
        # Python handles signals in the main thread only; in other threads nothing changes.
        main = threading.current_thread() is threading.main_thread()
        self.previous = {s: signal.signal(s, self._record) for s in handled_signals()} if main else {}
        return self

    def _record(self, signum: int, frame: FrameType | None) -> None:
        if self.signum == signal.SIGINT == signum:
            raise KeyboardInterrupt
        self.signum = signum
        if is_main_process():
            with contextlib.suppress(OSError):
                os.write(
                    2,
                    b"\nstopping after this step to save a checkpoint (Ctrl-C again: stop now, keeping the last checkpoint)\n",
                )

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)


def handled_signals() -> list[signal.Signals]:
    """Return the signals at which training saves and stops.

    SIGHUP, which the system sends when the terminal is closed, is one of them unless it is ignored, as under `nohup`.
    """
    found = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found
