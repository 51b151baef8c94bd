"""t-SNE in a separate process, so that a crash inside a numerical library affects one figure and not the page or the server.

`python -m longtail.reporting.embedding` is that process. It reads arrays (N, F) from standard input and writes positions (N, 2)
to standard output, each in the .npy format and preceded by its length in 8 bytes.
"""

import atexit
import contextlib
import io
import os
import struct
import subprocess
import sys
import threading
from typing import IO

import numpy as np

LENGTH = struct.Struct("<Q")
TIMEOUT = 60.0  # seconds


class EmbeddingWorker:
    """A process that computes t-SNE. It is started when it is first needed, and restarted after a crash."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def embed(self, x_NF: np.ndarray) -> np.ndarray | None:
        """Return positions (N, 2) of the rows of `x_NF`, the same at every call; None if they cannot be computed."""
        scaled = standardize(x_NF)
        if scaled is None:
            return None
        with self._lock:
            process = self._start()
            if process is None or process.stdin is None or process.stdout is None:
                return None
            limit = threading.Timer(TIMEOUT, process.kill)
            limit.start()
            try:
                write_array(process.stdin, scaled)
                found = read_array(process.stdout)
            except (OSError, ValueError, EOFError):
                self._stop()
                return None
            finally:
                limit.cancel()
        return found if found.shape == (len(x_NF), 2) and np.isfinite(found).all() else None

    def close(self) -> None:
        """Stop the process."""
        with self._lock:
            self._stop()

    def _start(self) -> "subprocess.Popen[bytes] | None":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join([package, *filter(os.path.isabs, inherited)])
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "longtail.reporting.embedding",
                ],  # -P: no module from the working directory
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=package,
                env=os.environ | {"PYTHONPATH": path},
            )
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None


WORKER = EmbeddingWorker()


def standardize(x_NF: np.ndarray) -> np.ndarray | None:
    """Return the features centered and divided by their standard deviation; None if it is zero or not finite.

    All values are first divided by the largest magnitude, so that squares neither overflow nor underflow.
    """
    if x_NF.ndim != 2 or not np.isfinite(x_NF).all():
        return None
    largest = np.abs(x_NF).max(initial=0.0)
    if not 1e-30 < largest < 1e30:
        return None
    scaled = x_NF / largest
    scaled = scaled - scaled.mean(0)
    std = float(scaled.std())
    if not std > 1e-9 or (np.ptp(scaled, axis=0) > 0).sum() < 2:
        return None
    return np.ascontiguousarray(scaled / std)


def compute(x_NF: np.ndarray) -> np.ndarray:
    """Return the t-SNE of standardized features in two dimensions."""
    from sklearn.manifold import TSNE  # takes a second to import

    perplexity = min(30.0, (len(x_NF) - 1) / 3)
    return np.asarray(TSNE(perplexity=perplexity, max_iter=500, angle=0.8, random_state=0).fit_transform(x_NF))


def write_array(pipe: IO[bytes], array: np.ndarray) -> None:
    """Write an array, preceded by its length."""
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    pipe.write(LENGTH.pack(content.tell()) + content.getvalue())
    pipe.flush()


def read_array(pipe: IO[bytes]) -> np.ndarray:
    """Read an array that `write_array` wrote; EOFError if the pipe was closed."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError("the pipe was closed")
    (length,) = LENGTH.unpack(head)
    content = pipe.read(length)
    if len(content) < length:
        raise EOFError("the pipe was closed")
    return np.asarray(np.load(io.BytesIO(content), allow_pickle=False))


def serve() -> None:
    """Answer requests until standard input is closed."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    while True:
        try:
            x_NF = read_array(requests)
        except EOFError:
            return
        write_array(replies, compute(x_NF))


if __name__ == "__main__":
    serve()
