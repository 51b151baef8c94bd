"""Hostile run folders and exported files: commands read or refuse them, write nowhere else, and show nothing else.

`hostile_runs` says what is changed, and how to run one case alone; `hostile_processes` says what is checked.
"""

import base64
import os
import signal
from collections.abc import Iterator

import pytest

from tests.odd.hostile_bases import Case, Place, make_images, make_outside
from tests.odd.hostile_checks import Before, Check, Ended, Result, summarize
from tests.odd.hostile_processes import Server
from tests.odd.hostile_values import MARKER, png_bytes

LEAST = 2_000  # cases in all
PARTS = 24  # of the long test, so that several processes can share it
REAL, REAL_PARTS = 60, 6  # cases that are real commands too

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """A process that has trained the runs which all cases start from; each worker of pytest has one."""
    started = Server(tmp_path_factory.mktemp("hostile"))
    yield started
    started.close()


def check(results: list[Result]) -> None:
    assert all(result.commands for result in results), "a case that runs no command shows nothing"
    assert not any(result.failures for result in results), "\n" + summarize(results)


def test_some_hostile_folders_are_read_or_refused(server):
    check(server.run(server.fast))


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_hostile_folders_are_read_or_refused(part, server):
    assert server.cases >= LEAST
    check(server.run(range(part, server.cases, PARTS)))


@pytest.mark.long
@pytest.mark.parametrize("part", range(REAL_PARTS))
def test_real_commands_read_or_refuse_hostile_folders(part, server):
    assert len(server.real) >= REAL
    check(server.run(server.real[part::REAL_PARTS], real=True))


# The checks themselves


def exited(code: int) -> int:
    return code << 8


def find_failures(place: Place, command: str = "report", act=lambda place: None, **values) -> list[str]:
    """Return the symptoms of a command that has done `act` and ended with these values."""
    case, before = Case(0, "finished", "x", lambda place, rng: None, (command,)), Before(place)
    act(place)
    ended = Ended(
        **{"status": exited(0), "seconds": 0.1, "computing": 0.1, "out": b"", "err": b"", "stack": ""} | values
    )
    return [failure.symptom for failure in Check(case, command, place, before, ended).failures]


@pytest.fixture
def place(tmp_path) -> Place:
    make_outside(tmp_path / "case/outside")
    make_images(tmp_path / "case/images")
    for name in ("runs/seed0", "work"):
        (tmp_path / "case" / name).mkdir(parents=True)
    return Place(tmp_path / "case", tmp_path / "case/runs/seed0")


TRACEBACK = b"""Traceback (most recent call last):
  File "/x/src/longtail/cli/__init__.py", line 39, in main
    code = dispatch(args)
  File "/x/src/longtail/reporting/table.py", line 7, in table
    json.loads(text)
  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads
ValueError: bad
"""
STACK = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/pathlib.py", line 1059 in read_text
  File "/x/src/longtail/run_folder.py", line 9 in read_text
  File "/x/src/longtail/cli/__init__.py", line 39 in main
"""


@pytest.mark.parametrize(
    ("values", "symptom"),
    [
        ({"status": None, "stack": STACK}, "hang at run_folder.py:9 read_text"),
        ({"status": signal.SIGSEGV, "stack": STACK}, "death by SIGSEGV at run_folder.py:9 read_text"),
        ({"status": exited(70), "err": TRACEBACK}, "traceback: ValueError at reporting/table.py:7 table"),
        ({"status": exited(1), "err": TRACEBACK}, "traceback: ValueError at reporting/table.py:7 table"),
        ({"status": exited(3)}, "exit code 3"),
        ({"status": exited(2)}, "exit code 2 without a line that says why"),
        ({"status": exited(2), "err": b"longtail: " + b"x" * 30_000}, "a line of more than 20,000 characters"),
        ({"out": MARKER.encode()}, "shows a secret in standard output"),
        ({"err": b"a\x1b[31m"}, "control characters on standard error"),
        ({"out": "\u202e".encode()}, "control characters on standard output"),
    ],
)
def test_a_bad_end_is_found(values, symptom, place):
    (found,) = find_failures(place, **values)
    assert found.startswith(symptom)


@pytest.mark.parametrize("values", [{}, {"status": exited(1)}, {"status": exited(2), "err": b"longtail: no\n"}])
def test_a_good_end_is_none(values, place):
    assert find_failures(place, **values) == []


def embed(data: bytes) -> str:
    return f'<img src="data:image/png;base64,{base64.b64encode(data).decode()}">'


@pytest.mark.parametrize(
    ("act", "symptom"),
    [
        (lambda p: (p.outside / "secret.txt").write_text(""), "writes outside"),
        (lambda p: (p.outside / "home/.cache").mkdir(), "writes outside"),
        (lambda p: os.utime(p.outside / "folder/state.pt"), "writes outside"),
        (lambda p: (p.images / "0.png").unlink(), "changes the images"),
        (lambda p: (p.root / "other").touch(), "writes beside"),
        (lambda p: (p.run / "predictions.tmp.npz").touch(), "leaves temporary files"),
        (lambda p: (p.work / "report.html").write_text(embed(b"GIF89a")), "a data URI that is not"),
        (lambda p: (p.work / "report.html").write_text("<script>alert(1)"), "markup of others"),
        (lambda p: (p.top / "table.md").write_text(MARKER), "shows a secret in runs/table.md"),
        (
            lambda p: (p.work / "report.html").write_text(embed(png_bytes((4, 4), MARKER))),
            "shows a secret in work/report",
        ),
    ],
)
def test_forbidden_outputs_are_detected(act, symptom, place):
    (found,) = find_failures(place, act=act)
    assert found.startswith(symptom)


GOOD = '{"path": "0.png", "predictions": [{"class": "a", "probability": 0.9}, {"class": "b", "probability": 0.1}]}\n'


@pytest.mark.parametrize(
    ("out", "symptoms"),
    [
        (GOOD * 2, []),
        (GOOD, ["predictions that are missing"]),
        (GOOD + GOOD.replace("0.1", "NaN"), ["probabilities that are none, with exit code 0"]),
        (GOOD + GOOD.replace("0.1", "-0.1"), ["probabilities that are none, with exit code 0"]),
        (GOOD + GOOD.replace("0.1", "0.2"), ["probabilities that are none, with exit code 0"]),
        (GOOD + "x", ["predictions that cannot be parsed"]),
    ],
)
def test_invalid_predictions_are_detected(out, symptoms, place):
    assert find_failures(place, "predict", out=out.encode()) == symptoms
