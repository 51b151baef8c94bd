"""Runs commands on hostile run folders, each in a process of its own with limits, and checks what they did.

The parent imports everything once and forks for each command, which takes some 25 milliseconds. It has one thread, as forking
with several is unsafe; tests start it as a server of its own, apart from the process of pytest.
"""

import contextlib
import ctypes
import errno
import faulthandler
import importlib.machinery
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import matplotlib
import numpy as np

from tests.odd import hostile_bases, hostile_cases
from tests.odd.hostile_bases import Case, Place
from tests.odd.hostile_checks import MEMORY, Before, Check, Ended, Result, show

ROOT = Path(__file__).parents[2]
FILE_SIZE = 2**30  # bytes of the largest file that a command may write
PATIENCE = 4  # multiple of the limit for a command that does not get enough processor time
PR_SET_PDEATHSIG = 1
START_SECONDS = 10.0  # added to the limit of real commands, which import torch first


# The parent


class Workshop:
    """Prepares cases, runs their commands and checks the results."""

    def __init__(self, folder: Path, seconds: float = 10.0) -> None:
        self.folder, self.seconds = folder, seconds
        self.bases = folder / "bases"
        lift_limits()
        sys.setrecursionlimit(20_000)  # folders may be nested deeply
        preload()
        os.environ["LONGTAIL_CACHE"] = str(folder / "cache")
        hostile_bases.build_bases(self.bases)
        self.cases = hostile_cases.make_cases(self.bases)
        self.fast = fast_folder(folder)
        self.warm_up()

    def warm_up(self) -> None:
        """Run each command on a valid run in this process, so that all modules are imported; all commands succeed."""
        for base, commands in GOOD.items():
            for command in commands:
                case = Case(-1, base, "unchanged", lambda place, rng: None, ())
                with tempfile.TemporaryDirectory(dir=self.fast) as root, open(os.devnull, "w") as devnull:
                    place, _ = hostile_bases.prepare(case, self.bases, Path(root) / "case")
                    with (
                        hostile_bases.in_folder(place.work),
                        contextlib.redirect_stdout(devnull),
                        contextlib.redirect_stderr(devnull),
                        patched(command),
                    ):
                        code = act(command, place)
                    assert code == (2 if command.startswith("from") else 0), (base, command, code)
        tasks = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["1"]
        deadline = time.monotonic() + 5
        while len(tasks) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
            tasks = os.listdir("/proc/self/task")
        assert len(tasks) == 1, "a process with several threads cannot be forked safely"

    def run(self, number: int, real: bool = False, verbose: bool = False) -> Result:
        """Run the commands of a case, each in folders of its own; with `real` the first one as `python -m longtail …`."""
        case, start = self.cases[number], time.monotonic()
        result = Result(number, case.what)
        for command in case.commands[:1] if real else case.commands:
            root = Path(tempfile.mkdtemp(prefix=f"{number}-", dir=self.folder if case.on_disk else self.fast))
            try:
                place, drawn = hostile_bases.prepare(case, self.bases, root / "case")
                if drawn:
                    result.what = f"{case.what} = {drawn}"
                before = Before(place)
                ended = self.run_command(case, command, place, real)
                check = Check(case, command, place, before, ended)
                result.commands += 1
                result.computing = round(result.computing + ended.computing, 3)
                result.failures += check.failures
                result.remarks += check.remarks
                if verbose:
                    show(result, command, place, ended, check)
            finally:
                remove_tree(root)
        result.seconds = round(time.monotonic() - start, 3)
        return result

    def run_command(self, case: Case, command: str, place: Place, real: bool) -> Ended:
        outputs = [place.root.parent / name for name in ("out", "err", "stack")]
        start = time.monotonic()
        limit = self.seconds + (START_SECONDS if real else 0)
        pid = os.fork()
        if pid == 0:
            become(case, command, place, outputs, real, limit)
        status, computing = wait(pid, limit)
        seconds = time.monotonic() - start
        kill_group(pid)  # what it has started
        out, err, stack = (path.read_bytes() if path.exists() else b"" for path in outputs)
        return Ended(status, seconds, computing, out, err, stack.decode(errors="replace"))


def wait(pid: int, seconds: float) -> tuple[int | None, float]:
    """Wait for a child and return its status and processor time; kill it after a while, and return None for its status.

    A child that computes has more time where other processes take the processor from it; one that waits for something has not.
    """
    handle, start = os.pidfd_open(pid), time.monotonic()
    try:
        ready, _, _ = select.select([handle], [], [], seconds)
        while not ready and time.monotonic() - start < PATIENCE * seconds and is_computing(pid, seconds):
            ready, _, _ = select.select([handle], [], [], 0.5)
    finally:
        os.close(handle)
    if not ready:
        kill_group(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return status if ready else None, usage.ru_utime + usage.ru_stime


def is_computing(pid: int, seconds: float) -> bool:
    """Return whether a process runs, can run or waits for a disk, and has not yet had so many seconds of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return fields[0] in "RD" and used < seconds


def kill_group(pid: int) -> None:
    """Kill the children of a child, which is the leader of its own process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def remove_tree(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    if root.exists():  # nested too deeply for Python
        subprocess.run(["rm", "-rf", "--", str(root)], check=True)


def lift_limits() -> None:
    """Undo the soft limit of the tests that start this process."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def fast_folder(folder: Path) -> Path:
    """Return a folder in memory if possible, and otherwise one below `folder`."""
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2**30:
        made = Path(tempfile.mkdtemp(prefix="longtail-hostile-", dir=shared))
    else:
        made = folder / "cases"
        made.mkdir()
    import atexit

    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(made, ignore_errors=True))
    return made


def preload() -> None:
    """Import all that commands import, with one thread for everything."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "LONGTAIL_TRACEBACK": "1",
        "MPLBACKEND": "Agg",
        "LONGTAIL_COMMIT": "test",
        "LONGTAIL_DATA": "",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow, which pandas imports, would start a thread
    }
    import sklearn.manifold
    import torch
    import torch.utils.tensorboard

    from longtail.engine import evaluate
    from longtail.inference import export

    matplotlib.use("Agg")
    assert sklearn.manifold and torch.utils.tensorboard
    torch.set_num_threads(1)
    evaluate.LATENCY_SECONDS = 0.0
    export.MAX_SECONDS = 0.0


GOOD = {
    "finished": ("report", "table", "predict", "export", "eval", "gradient", "latency", "from", "board", "resume"),
    "begun": ("resume", "resume-tensorboard", "resume-wandb", "report", "board"),
    "pair": ("report", "table"),
    "head": ("report", "predict", "eval"),
    "teacher": ("distill",),
    "fresh": ("resume-head",),
    "export": ("predict-train", "predict-csv", "predict-table", "export"),
}
REAL = {
    *("report", "table", "predict", "predict-train", "predict-csv", "predict-table", "predict-weights"),
    *("export", "eval", "gradient", "latency", "resume", "resume-head", "distill"),
}
"""Commands that can be run without what `patched` replaces."""


# The child


def become(case: Case, command: str, place: Place, outputs: list[Path], real: bool, limit: float) -> NoReturn:
    """Run a command in this process, which was forked for it, and end."""
    code = 70
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a command does not outlive the server
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        streams = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) for path in outputs]
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(streams[0], 1)
        os.dup2(streams[1], 2)
        os.chdir(place.work)
        os.environ |= environment(place)
        if case.late:
            hostile_bases.apply_change(case, place)
        set_limits()
        sys.setrecursionlimit(1_000)
        if real:
            args = [sys.executable, "-m", "longtail", *hostile_bases.arguments(command, place)]
            os.environ["PYTHONFAULTHANDLER"] = "1"
            os.execve(sys.executable, args, os.environ)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable(streams[2], all_threads=True)
        faulthandler.dump_traceback_later(0.95 * limit, repeat=True, file=streams[2])
        with patched(command):
            code = act(command, place)
        sys.stdout.flush()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 70
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def environment(place: Place) -> dict[str, str]:
    """Return the environment variables of a command: a read-only home, and a network that cannot be reached."""
    nowhere = "http://127.0.0.1:9"
    return {
        "HOME": str(place.outside / "home"),
        "MPLCONFIGDIR": matplotlib.get_cachedir(),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])),
        "LONGTAIL_CACHE": str(place.work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), nowhere),
    }


def set_limits() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def act(command: str, place: Place) -> int:
    if command == "board":
        from longtail.reporting.server import LivePage

        page = LivePage([place.top]).page()
        (place.work / "board.html").write_bytes(page)
        return 0
    from longtail.cli import main

    return main(hostile_bases.arguments(command, place))


@contextlib.contextmanager
def patched(command: str) -> Any:
    """Keep a command off the network, off Weights & Biases and, where it would train a strange configuration, off training.

    t-SNE is computed in the process of the command, under its limits, because starting a process for it takes seconds.
    """
    from longtail.reporting import embedding

    unreachable = mock.Mock(side_effect=OSError(errno.ENETUNREACH, "Network is unreachable"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("socket.socket.connect", unreachable))
        stack.enter_context(mock.patch("socket.getaddrinfo", unreachable))
        stack.enter_context(mock.patch.object(embedding.WORKER, "embed", embed_here))
        if command.startswith("from"):
            stack.enter_context(mock.patch("longtail.engine.train.Session.train_seeds"))
        if command == "resume-wandb":
            stack.enter_context(mock.patch.dict(sys.modules, {"wandb": stub_wandb()}))
        yield


def embed_here(x_NF: np.ndarray) -> np.ndarray | None:
    """Compute in this process what EmbeddingWorker computes in another one."""
    from longtail.reporting import embedding

    scaled = embedding.standardize(x_NF)
    found = None if scaled is None else embedding.compute(scaled)
    return found if found is not None and np.isfinite(found).all() else None


def stub_wandb() -> types.ModuleType:
    """Return a replacement for wandb that accepts the same calls and sends nothing."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="stub")

    def init(*, id: str, dir: str, **_: Any) -> Any:
        if not isinstance(id, str) or not id or set(id) & set("/\\#?%:\0"):
            raise ValueError(f"invalid id {id!r:.100}")
        return mock.Mock(summary={})

    module.init, module.Settings = init, dict  # type: ignore[attr-defined]
    return module


# The server, and its client


def serve(folder: Path, seconds: float) -> None:
    """Run the cases that standard input names, a line of JSON at a time, and write their results as lines of JSON."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its folders are removed
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    shop = Workshop(folder, seconds)
    fast, real = hostile_cases.select_fast(shop.cases), hostile_cases.select_real(shop.cases, REAL)
    print(json.dumps({"cases": len(shop.cases), "fast": fast, "real": real}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        found = [shop.run(number, asked.get("real", False)).to_dict() for number in asked["cases"]]
        print(json.dumps(found), file=answers, flush=True)


class Server:
    """A process that runs cases on request."""

    def __init__(self, folder: Path, seconds: float = 10.0) -> None:
        command = [sys.executable, "-m", "tests.odd.hostile_runs", "--serve", str(folder), "--seconds", str(seconds)]
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        about = self.read()
        self.cases: int = about["cases"]
        self.fast: list[int] = about["fast"]
        self.real: list[int] = about["real"]

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of hostile cases has ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self, cases: Sequence[int], real: bool = False) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"cases": list(cases), "real": real}), file=self.process.stdin, flush=True)

    def run(self, cases: Sequence[int], real: bool = False) -> list[Result]:
        self.ask(cases, real)
        return [Result.from_dict(tree) for tree in self.read()]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run_parallel(folder: Path, jobs: int, seconds: float, every: int, known: Collection[int]) -> Iterator[Result]:
    """Yield the results of all cases that are not known yet, or of every n-th one, computed by several servers."""
    servers = [Server(folder / str(i), seconds) for i in range(jobs)]
    left = [number for number in range(0, servers[0].cases, every) if number not in known]
    busy = {}

    def ask(server: Server) -> None:
        some = [left.pop(0) for _ in range(min(10, len(left)))]
        if some:
            server.ask(some)
            busy[server.process.stdout] = server

    for server in servers:
        ask(server)
    while busy:
        for stream in select.select(list(busy), [], [])[0]:
            server = busy.pop(stream)
            yield from map(Result.from_dict, server.read())
            ask(server)
    for server in servers:
        server.close()
