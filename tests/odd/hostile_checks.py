"""Check how a command on a hostile run folder ended: exit code, outputs, and the folders around the run."""

import base64
import contextlib
import csv
import hashlib
import json
import math
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.odd.hostile_bases import Case, Place, arguments
from tests.odd.hostile_values import MARKER

MEMORY = 2 * 2**30  # bytes that a command may take in addition to what the parent has
LONGEST_LINE = 20_000  # characters of a line on standard error
CODES = (0, 1, 2)
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
PERCENT = re.compile(r"(?<!\S)(\d[\d.e+-]*|-?nan|-?inf) ?%")
"""A probability in the table of `longtail predict`; names of classes may contain the sign, too."""
DATA_URI = re.compile(rb"data:([a-z]+/[a-z0-9.+-]*);base64,([A-Za-z0-9+/=]*)")
MAGIC = {b"image/png": b"\x89PNG\r\n\x1a\n", b"image/webp": b"RIFF"}
INJECTED = (b"<script>alert", b"<img src=x", b"<svg onload")
OUR_FRAME = re.compile(r'File "[^"]*?/(?:src|site-packages)/longtail/([^"]+)", line (\d+),? in (\S+)')


@dataclass(frozen=True)
class Failure:
    symptom: str
    """What cases of the same cause have in common: the kind of failure, the type of an exception, and where it was raised."""
    command: str
    detail: str


@dataclass
class Result:
    number: int
    what: str
    commands: int = 0
    seconds: float = 0.0
    """Wall time of its commands."""
    computing: float = 0.0
    """Processor time of its commands."""
    failures: list[Failure] = field(default_factory=list)
    remarks: list[Failure] = field(default_factory=list)
    """What is allowed but could be better."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> "Result":
        lists = {key: [Failure(**entry) for entry in tree[key]] for key in ("failures", "remarks")}
        return cls(**{**tree, **lists})


@dataclass(frozen=True)
class Ended:
    """A process that ended or was killed."""

    status: int | None
    """As of `os.waitpid`; None where it ran for too long."""
    seconds: float
    computing: float
    out: bytes
    err: bytes
    stack: str
    """Where it was when it crashed or ran for too long."""


# Checks


class Before:
    """The state of the folders around a run before a command."""

    def __init__(self, place: Place) -> None:
        self.outside = snapshot(place.outside)
        self.images = snapshot(place.images)
        self.root = sorted(os.listdir(place.root))
        self.inside = names_below(place.top)


def names_below(folder: Path) -> set[str]:
    return {os.path.join(top, name) for top, folders, files in os.walk(folder) for name in (*folders, *files)}


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return kind, size, time and content of everything in a folder; links are not followed."""
    found = {}
    for path in [str(folder), *sorted(names_below(folder))]:
        about = os.lstat(path)
        content = Path(path).read_bytes() if os.path.isfile(path) else b""
        digest = hashlib.sha256(content).hexdigest()[:12]
        found[path] = (about.st_mode, about.st_size, about.st_mtime_ns, digest)
    return found


class Check:
    """Collects everything that is wrong with how a command ended."""

    def __init__(self, case: Case, command: str, place: Place, before: Before, ended: Ended) -> None:
        self.case, self.command, self.place, self.before, self.ended = case, command, place, before, ended
        self.err, self.out = ended.err.decode(errors="replace"), ended.out.decode(errors="replace")
        self.failures: list[Failure] = []
        self.remarks: list[Failure] = []
        self.code = None
        if ended.status is not None and os.WIFEXITED(ended.status):
            self.code = os.WEXITSTATUS(ended.status)
        self.check_end()
        self.check_folders()
        self.check_secret()
        self.check_terminal()
        self.check_pages()
        if command.startswith("predict") and self.code == 0:
            self.check_predictions()

    def fail(self, symptom: str, detail: str = "") -> None:
        self.failures.append(Failure(symptom, self.command, " ".join(detail[:600].split())[:300]))

    def remark(self, symptom: str, detail: str = "") -> None:
        self.remarks.append(Failure(symptom, self.command, " ".join(detail[:600].split())[:300]))

    def check_end(self) -> None:
        ended, error = self.ended, self.err
        if ended.status is None:
            return self.fail(f"hang at {innermost(ended.stack, first=True)}")
        if os.WIFSIGNALED(ended.status):
            name = signal.Signals(os.WTERMSIG(ended.status)).name
            return self.fail(f"death by {name} at {innermost(ended.stack or error, first=True)}")
        if "Traceback (most recent call last)" in error:
            return self.fail(f"traceback: {exception_type(error)} at {innermost(error)}", last_line(error))
        if self.code not in CODES:
            return self.fail(f"exit code {self.code}", last_line(error))
        if self.code == 2 and not last_line(error).startswith("longtail: "):
            self.fail("exit code 2 without a line that says why", error[-300:])
        if "panicked at" in error:
            self.fail("panic of a compiled library", error[:300])
        longest = max(map(len, error.splitlines()), default=0)
        if longest > LONGEST_LINE:
            self.fail(
                f"a line of more than {LONGEST_LINE:,} characters on standard error", f"{longest:,}: {error[:100]}"
            )
        if self.case.endless and "not enough memory" in error:
            self.fail(f"takes more than {MEMORY >> 30} GiB of memory because of one file")
        elif self.code == 1:
            self.remark("exit code 1: " + re.sub(r"/[^ ]+|\d+", "…", last_line(error)[:300])[:120], last_line(error))
        for line in error.splitlines():
            if "Warning: " in line[:300]:
                self.remark("warning: " + re.sub(r"^.*?/(?=[^/ ]*:\d+: )", "", line[:300])[:120], line[:300])

    def check_folders(self) -> None:
        after = snapshot(self.place.outside)
        if after != self.before.outside:
            changed = {
                path for path in after.keys() | self.before.outside if after.get(path) != self.before.outside.get(path)
            }
            names = sorted(os.path.relpath(path, self.place.outside) for path in changed)
            changed_files = [name for name in names if name not in (".", "folder", "empty", "home")] or names
            self.fail("writes outside of the folder", f"changed: {' '.join(changed_files)}")
        if snapshot(self.place.images) != self.before.images:
            self.fail("changes the images")
        if sorted(os.listdir(self.place.root)) != self.before.root:
            self.fail("writes beside the folder", str(os.listdir(self.place.root)))
        if self.ended.status is not None and not self.case.late:
            new = names_below(self.place.top) - self.before.inside
            left = [name for name in map(os.path.basename, new) if name.startswith(".") or ".tmp" in name]
            if left:
                self.fail("leaves temporary files behind", " ".join(left))

    def outputs(self) -> dict[str, bytes]:
        """Return all that the command has written."""
        found = {"standard output": self.ended.out, "standard error": self.ended.err}
        new = names_below(self.place.top) - self.before.inside
        written = [*names_below(self.place.work), *new]
        written += [str(self.place.top / name) for name in ("table.md", "table.json")]
        for path in written:
            if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) < 2**28:
                found[os.path.relpath(path, self.place.root)] = Path(path).read_bytes()
        return found

    def check_secret(self) -> None:
        for name, content in self.outputs().items():
            inside = [decode(match[1]) for match in DATA_URI.findall(content)]
            if any(MARKER.encode() in part for part in (content, *inside)):
                self.fail(
                    f"shows a secret in {re.sub(r'[0-9]+', 'N', name)}",
                    "in a data URI" if MARKER.encode() not in content else "",
                )

    def check_terminal(self) -> None:
        for name, text in (("output", self.out), ("error", self.err)):
            if found := CONTROL.search(text):
                self.fail(f"control characters on standard {name}", repr(text[max(0, found.start() - 60) :][:120]))

    def check_pages(self) -> None:
        for path in self.place.work.glob("*.html"):
            content = path.read_bytes()
            for word in INJECTED:
                if word in content:
                    self.fail("markup of others in the page", repr(content[content.index(word) - 60 :][:160]))
            pairs = [(kind, decode(data)) for kind, data in DATA_URI.findall(content)]
            wrong = [data for kind, data in pairs if kind in MAGIC and not data.startswith(MAGIC[kind])]
            if wrong:
                self.fail("a data URI that is not the image it claims to be", repr(wrong[0][:60]))
            if self.case.endless and b"MemoryError()" in content:
                self.fail(f"takes more than {MEMORY >> 30} GiB of memory because of one file")
            elif b"Something in their folders is not understood" in content:
                said = re.search(rb"is not understood: (.{0,200})", content)
                self.remark("the live page cannot be shown: " + said[1][:100].decode(errors="replace") if said else "")
            if re.search(rb"[>\s](nan|NaN|inf|-inf)[<\s%]", content):
                found = re.search(rb".{0,60}[>\s](nan|NaN|inf|-inf)[<\s%].{0,20}", content)
                self.remark("nan or inf on the page", repr(found[0]) if found else "")

    def check_predictions(self) -> None:
        try:
            rows = list(self.probabilities())
        except (ValueError, KeyError, TypeError, OSError, csv.Error) as error:
            return self.fail("predictions that cannot be parsed", repr(error))
        images = len(os.listdir(self.place.images))
        if len(rows) != images and self.command != "predict-table":
            self.fail("predictions that are missing", f"{len(rows)} of {images}")
        for row in rows:
            sound = all(math.isfinite(p) and 0 <= p <= 1 for p in row) and sum(row) <= 1 + 1e-6 + 1e-6 * len(row)
            if not row or not sound:
                self.fail("probabilities that are none, with exit code 0", str(row))
                break

    def probabilities(self) -> Iterable[list[float]]:
        """Yield the probabilities of each image, which are printed with six digits."""
        if self.command == "predict-csv":
            with open(self.place.work / "out.csv", newline="", encoding="utf-8") as file:
                csv.field_size_limit(2**30)  # names of classes may be long
                for record in csv.DictReader(file):
                    yield [float(p) for key, p in record.items() if key.startswith("probability") and p]
        elif self.command == "predict-table":
            text = re.sub(r"│", " ", self.out)
            for row in re.split(r"(?m)^\s*(?=[01]\.png)", text)[1:]:  # long names break a row into several lines
                yield [float(p) / 100 for p in PERCENT.findall(row)]
        else:
            for line in self.out.splitlines():
                yield [float(guess["probability"]) for guess in json.loads(line)["predictions"]]


def decode(data: bytes) -> bytes:
    with contextlib.suppress(ValueError):
        return base64.b64decode(data)
    return b""


def innermost(text: str, first: bool = False) -> str:
    """Return the innermost frame of the package in a traceback, or in a dump of faulthandler, which begins with it."""
    frames = OUR_FRAME.findall(text)
    if not frames:
        return "no frame of the package"
    path, line, name = frames[0 if first else -1]
    return f"{path}:{line} {name}"


def exception_type(text: str) -> str:
    names = re.findall(r"^([A-Za-z_][\w.]*)(?::|$)", text, re.MULTILINE)
    return names[-1] if names else "unknown"


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def show(result: Result, command: str, place: Place, ended: Ended, check: Check) -> None:
    args = " ".join(arguments(command, place)) if command != "board" else "the page of `longtail watch`"
    print(f"case {result.number}: {result.what}")
    print(f"  {command}: {args}".replace(str(place.root), "."))
    print(f"  ended with {check.code} (status {ended.status}) after {ended.seconds:.2f} s")
    for name, content in (("out", check.out), ("err", check.err), ("stack", ended.stack)):
        for line in content.splitlines()[-40:]:
            print(f"  {name}| {line[:300]}".encode("ascii", "backslashreplace").decode())
    for failure in check.failures:
        print(f"  FAILURE {failure.symptom}: {failure.detail}".encode("ascii", "backslashreplace").decode())
    for remark in check.remarks:
        print(f"  remark {remark.symptom}: {remark.detail}".encode("ascii", "backslashreplace").decode())


# Results


def summarize(results: Sequence[Result], remarks: bool = False) -> str:
    """Return all failures, grouped by symptom, the most frequent first."""
    commands, seconds, computing = (
        sum(getattr(r, key) for r in results) for key in ("commands", "seconds", "computing")
    )
    bad = [result for result in results if result.failures]
    took = f"{commands} commands, {seconds:.0f} s, {computing:.0f} s of processor time"
    lines = [f"{len(bad)} of {len(results)} cases fail ({took})"]
    lines += grouped(results, "failures")
    if remarks:
        lines += ["", "remarks:", *grouped(results, "remarks")]
    return "\n".join(lines).encode("ascii", "backslashreplace").decode()


def grouped(results: Sequence[Result], which: str) -> list[str]:
    groups: dict[str, list[tuple[Result, Failure]]] = defaultdict(list)
    for result in results:
        for failure in getattr(result, which):
            groups[failure.symptom].append((result, failure))
    lines = []
    for symptom, found in sorted(groups.items(), key=lambda item: -len(item[1])):
        numbers = sorted({result.number for result, _ in found})
        more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
        lines.append(f"{len(found):4} × {symptom}")
        lines.append(f"       cases {' '.join(map(str, numbers[:8]))}{more}")
        for result, failure in found[:: max(1, len(found) // 3)][:3]:
            lines.append(f"       {failure.command}, {result.what[:160]}: {failure.detail[:160]}")
    return lines
