"""`longtail watch`: a page that follows runs as they are trained, and a server that gives nothing else away."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

import longtail
from longtail import recipes, runs
from longtail.cli import main
from longtail.config import to_dict
from longtail.engine.train import train
from longtail.errors import UserError
from longtail.report import live, server, training
from longtail.report.document import policy, report
from longtail.report.live import Board
from tests.conftest import tiny
from tests.processes import start
from tests.report import browser
from tests.report.made import Page, make_run

COUNTS = [300, 120, 12, 4]
HOSTILE = "<script>alert(1)</script>"


def begin(folder, epochs: int, method: str = "ce", seed: int = 0, total: int | None = 8, day: int = 2):
    """A run in the middle of its training, after so many epochs."""
    config = recipes.digits_lt(method)
    folder.mkdir(parents=True, exist_ok=True)
    data = {"checksum": "0", "images": sum(COUNTS), "counts": COUNTS, "notes": []}
    environment = {"seed": seed, "commit": "abc", "device": "CPU", "started": f"2026-01-{day:02}", "precision": "fp32"}
    runs.write_json(folder / runs.CONFIG, to_dict(replace(config, train=replace(config.train, seeds=(seed,)))))
    runs.write_json(folder / runs.ENVIRONMENT, environment | {"data": data} | ({"epochs": total} if total else {}))
    (folder / runs.LOG).write_text("".join(line(e) for e in range(epochs)))
    return folder


def line(epoch: int) -> str:
    row = {"stage": "train", "epoch": epoch, "epochs": 8, "loss": 5 - epoch / 2, "seconds": 10 + epoch, "lr": 0.1}
    return json.dumps(row | ({"val_accuracy": 50.0 + epoch} if epoch % 2 else {})) + "\n"


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Boards in this process look at once."""
    monkeypatch.setattr(live, "GLANCE", 0.0)


def read(board: Board) -> Page:
    return Page(board.page().decode())


def under_way(page: Page) -> dict[str, dict[str, tuple[str, str | None]]]:
    """Of the runs that are not finished: (text, value) by heading."""
    for head, *body in page.tables:
        if head[0][0] == "run":
            return {row[0][0].strip(): dict(zip([text for text, _ in head], row, strict=True)) for row in body}
    return {}


# What the page says


def test_progress_is_that_of_the_log(tmp_path):
    begin(tmp_path / "a/seed0", 3)
    begin(tmp_path / "b/seed1", 0, "paco", seed=1)
    found = under_way(read(Board([tmp_path])))
    assert found.keys() == {"Cross-entropy, seed 0", "PaCo, seed 1"}
    ce = found["Cross-entropy, seed 0"]
    assert ce["epoch"][0].strip() == "3 of 8" and ce["loss"][0] == "4.000" and ce["validation, %"][0] == "51.0"
    assert float(ce["training time left"][1]) == pytest.approx((10 + 11 + 12) / 3 * 5)
    assert ce["training time left"][0] == "about 0:55" and ce["training, %"][0] == "–"
    assert found["PaCo, seed 1"]["epoch"][0].strip() == "0 of 8" and found["PaCo, seed 1"]["loss"][0] == "–"


def test_epochs_are_those_of_all_stages_and_the_latest_run_comes_first(tmp_path):
    for i, (total, expected) in enumerate(((30, 30), (None, 8), (2, 5))):
        run = runs.read_begun(begin(tmp_path / f"{i}/seed0", 5, total=total, day=i + 1))
        assert training.look_at(run).epochs == expected
    assert list(under_way(read(Board([tmp_path])))) == [f"Cross-entropy, seed 0 in {i}/seed0" for i in (2, 1, 0)]


def test_a_run_keeps_its_colour(tmp_path):
    """In table, curves and legend, while others begin, and also where one has no epoch yet."""
    begin(tmp_path / "a/seed0", 0, day=1)
    begin(tmp_path / "b/seed0", 3, "paco", day=2)
    for others in range(2):
        text = str(training.unfinished([runs.read_begun(folder) for folder in runs.find(tmp_path)]))
        assert re.search(r'<path d="M[^"]*L[^"]*" class="line c1"><title>PaCo, seed 0</title>', text)
        beside = re.findall(r'class="line (c\d)"></path><path [^>]*></path></svg> (?:<[^>]*>)?PaCo, seed 0<', text)
        assert len(beside) > 2 and {*beside} == {"c1"}
        begin(tmp_path / f"0{others}/seed0", 2, "focal", day=3)


def test_a_run_begins_goes_on_and_ends(tmp_path):
    board = Board([tmp_path / "later"])
    assert "There is no run yet below" in read(board).words() and "Waiting" in read(board).words()
    for epochs in (0, 1, 2):
        before = board.version()
        begin(tmp_path / "later/ce/seed0", epochs)
        assert board.version() != before
        page = read(board)
        assert under_way(page)["Cross-entropy, seed 0"]["epoch"][0].strip() == f"{epochs} of 8"
        assert ("Under way: training loss" in page.words()) == (epochs > 0)
    make_run(tmp_path / "made", recipes.digits_lt("ce"), 0, COUNTS)
    os.replace(tmp_path / "made", tmp_path / "later/paco")
    page = read(board)
    assert len(under_way(page)) == 1 and "In short" in page.words()
    for file in (runs.METRICS, runs.ENVIRONMENT):
        (tmp_path / "later/ce/seed0" / file).write_bytes((tmp_path / "later/paco" / file).read_bytes())
    assert under_way(read(board)) == {}


def test_nothing_is_made_twice(tmp_path, monkeypatch):
    made = make_run(tmp_path / "done/seed0", recipes.digits_lt("paco"), 0, COUNTS)
    log, calls, finished = begin(tmp_path / "going/seed0", 1) / runs.LOG, [], live.finished
    monkeypatch.setattr(live, "finished", lambda rows: calls.append(len(rows)) or finished(rows))
    board = Board([tmp_path])
    assert board.page() is board.page()
    log.write_text(log.read_text() + line(1))
    assert "2 of 8" in read(board).words() and calls == [1]  # results are kept while others are trained
    (made / runs.METRICS).write_text((made / runs.METRICS).read_text() + "\n")
    assert board.page() and calls == [1, 1]
    monkeypatch.setattr(live, "GLANCE", 60.0)
    monkeypatch.setattr(live, "stamp", lambda folders: pytest.fail("looked again"))
    assert board.version() == board.version()


@pytest.mark.parametrize("file", [runs.CONFIG, runs.ENVIRONMENT, runs.LOG, runs.METRICS])
def test_half_written_files_do_no_harm(tmp_path, file):
    begin(tmp_path / "sound/seed0", 2)
    path = begin(tmp_path / "half/seed1", 3, "paco", seed=1) / file
    whole = path.read_bytes() if path.exists() else b'{"top1": 50.0, "few": 1}'
    board = Board([tmp_path])
    for size in {*range(0, len(whole) - 2, max(1, len(whole) // 25)), len(whole) - 2}:
        path.write_bytes(whole[:size])
        os.utime(path, ns=(size, size))
        page = read(board)
        assert "Cross-entropy, seed 0" in under_way(page)
        assert ("PaCo, seed 1" in under_way(page)) == (file == runs.LOG)
        assert ("Left out" in page.words()) == (file != runs.LOG)


def test_a_log_is_read_up_to_what_is_just_being_written(tmp_path):
    run = runs.read_begun(begin(tmp_path / "a/seed0", 3))
    (run.folder / runs.LOG).write_text(line(0) + line(1) + line(2)[:20])
    assert len(training.look_at(run).log) == 2


@pytest.mark.parametrize(
    "content", ['{"loss": "x", "seconds": [], "epochs": {}}', '{"loss": NaN, "seconds": Infinity}']
)
def test_lines_that_make_no_sense_are_shown_as_nothing(tmp_path, content):
    log = begin(tmp_path / "a/seed0", 0, total=None) / runs.LOG
    log.write_text(content + "\n")
    (found,) = under_way(read(Board([tmp_path]))).values()
    assert found["loss"][0] == found["training time left"][0] == "–"


def test_what_nobody_foresaw_is_said_and_later_mended(tmp_path):
    folder = make_run(tmp_path / "a/seed0", recipes.digits_lt("ce"), 0, COUNTS)
    board, whole = Board([tmp_path]), (folder / runs.ENVIRONMENT).read_text()
    (folder / runs.ENVIRONMENT).write_text(whole.replace('"checksum"', '"another"'))
    assert "KeyError('checksum')" in read(board).words()
    (folder / runs.ENVIRONMENT).write_text(whole)
    assert "In short" in read(board).words()


def test_hostile_names_are_text(tmp_path):
    begin(tmp_path / HOSTILE.replace("/", "") / "seed0", 2)
    begin(tmp_path / "x" / "seed0", 2)  # then folders tell them apart
    make_run(tmp_path / "done" / "seed0", recipes.digits_lt("paco"), 0, COUNTS, [HOSTILE, "'\"", "&", "<b>"])
    (tmp_path / "<i>").mkdir()
    for name in (runs.CONFIG, runs.ENVIRONMENT):
        (tmp_path / "<i>" / name).write_text("{")
    page = read(Board([tmp_path]))
    assert len(page.of("script")) == 2 and page.of("b") == page.of("i") == []
    assert not [key for _, given in page.elements for key in given if key.startswith("on") or key == "style"]
    assert HOSTILE.replace("/", "") in page.words() and "<i>" in page.words() and HOSTILE in page.words()


def test_a_report_shows_unfinished_runs_too(tmp_path):
    begin(tmp_path / "runs/ce/seed0", 3)
    page = Page(report(tmp_path / "runs", tmp_path / "page.html").read_text())
    assert list(under_way(page)) == ["Cross-entropy, seed 0"] and "One run under way" in page.words()
    make_run(tmp_path / "runs/paco/seed0", recipes.digits_lt("paco"), 0, COUNTS)
    page = Page(report(tmp_path / "runs", tmp_path / "page.html").read_text())
    assert list(under_way(page)) == ["Cross-entropy, seed 0"] and "In short" in page.words()
    assert len(page.of("script")) == 1  # it is not live
    bars = page.of("progress")
    assert [bar["aria-label"] for bar in bars] == ["Cross-entropy, seed 0: 3 of 8 epochs"]


def test_of_very_many_runs_some_are_drawn(tmp_path):
    for i in range(23):
        begin(tmp_path / f"{i}/seed{i}", 2, seed=i, day=i + 1)
    page = read(Board([tmp_path]))
    assert len(under_way(page)) == 23 and f"Curves of the {training.LOOKS} that began first" in page.words()
    drawn = [f"Cross-entropy, seed {i}" in page.text["title"] for i in range(23)]
    assert drawn == [True] * training.LOOKS + [False] * 3


# The server


@pytest.fixture
def served(tmp_path):
    """A server in this process, with a run to show."""
    begin(tmp_path / "runs/seed0", 2)
    with server.serve([tmp_path / "runs"], 0) as here:
        threading.Thread(target=here.serve_forever, args=(0.02,), daemon=True).start()
        yield here
        here.shutdown()


def ask(port: int, path: str = "/", method: str = "GET", headers=None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=headers is not None)
    for key, value in headers or ():
        connection.putheader(key, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_there_are_two_paths_and_their_heads(served):
    for path, kind in (("/", "text/html"), ("/version", "text/plain")):
        status, headers, body = ask(served.port, path)
        assert status == 200 and body and headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"] == f"{policy(live=True)}; frame-ancestors 'none'"
        assert "Python" not in headers["Server"]
        head_status, head, nothing = ask(served.port, path, "HEAD")
        assert (head_status, nothing, head["Content-Length"]) == (200, b"", str(len(body)))
    page = Page(ask(served.port)[2].decode())
    (inner,) = [a["content"] for a in page.of("meta") if a.get("http-equiv")]
    assert inner == policy(live=True) and "connect-src 'self'" in inner and "connect-src" not in policy()
    (live_line,) = [a for a in page.of("p") if a.get("class") == "live"]
    assert live_line["data-version"] == ask(served.port, "/version")[2].decode() and live_line["role"] == "status"


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "//etc/passwd",
        "/seed0/config.json",
        "/seed0/",
        "/index.html",
        "/version/../seed0/log.jsonl",
        "/?path=/etc/passwd",
        "/%00",
        "*",
    ],
)
def test_no_other_path_leads_anywhere(served, path):
    status, headers, body = ask(served.port, path)
    assert (status, body) == (404, b"there is / and nothing else") and headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize(
    "hosts,status",
    [
        (["localhost:{}"], 200),
        (["127.0.0.1"], 200),
        (["[::1]:9999"], 200),  # through a tunnel
        (["LOCALHOST"], 200),
        (["evil.example:{}"], 421),
        (["localhost.evil.example"], 421),
        (["127.0.0.1.evil.example"], 421),
        (["localhost@evil.example"], 421),
        (["evil.example@localhost"], 421),
        ([""], 421),
        ([], 421),
        (["localhost", "evil.example"], 421),
    ],
)
def test_only_who_asks_for_this_machine_is_answered(served, hosts, status):
    given = [("Host", host.format(served.port)) for host in hosts]
    for path in ("/", "/version"):
        found, _, body = ask(served.port, path, headers=given)
        assert found == status and (status == 200 or b"ask for it as" in body)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(served, method):
    status, headers, body = ask(served.port, "/", method)
    assert (status, headers["Allow"], body) == (405, "GET, HEAD", b"only GET and HEAD")


@pytest.mark.parametrize(
    "request_line,status",
    [
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"414"),
        (b"BREW / HTTP/1.1", b"501"),
        (b"<script>alert(1)</script>", b"Bad request syntax"),
        (b"GET / HTTP/9.9", b"Invalid HTTP version"),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost", b"404"),
        (b"GET / HTTP/1.1\r\n" + b"\r\n".join(b"A: b" for _ in range(300)), b"431"),
    ],
)
def test_what_is_no_request_is_refused_and_harms_nobody(served, request_line, status):
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as raw:
        raw.sendall(request_line + b"\r\n\r\n")
        answer = raw.makefile("rb").read()
    assert status in answer.splitlines()[0] and b"<" not in answer
    with socket.create_connection(("127.0.0.1", served.port)) as gone:
        gone.sendall(b"GET / HT")  # and leaves
    assert ask(served.port)[0] == 200


def test_it_listens_on_loopback_alone(served):
    assert served.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", served.port), timeout=5)


def test_many_readers_share_one_page(served, monkeypatch):
    calls, made = [], live.unfinished
    monkeypatch.setattr(live, "unfinished", lambda begun: calls.append(1) or time.sleep(0.2) or made(begun))
    found = []
    readers = [threading.Thread(target=lambda: found.append(ask(served.port)[2])) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
    assert len(found) == 8 and len({*found}) == 1 and calls == [1]


def test_what_cannot_be_served_is_a_users_error(served, tmp_path, capsys):
    taken = str(served.port)
    assert main(["watch", str(tmp_path), "--port", taken]) == 2
    said = capsys.readouterr().err
    assert f"--port {taken}: Address already in use" in said and "--port 0" in said
    for args, words in (
        (["watch"], "name the runs"),
        (["watch", str(tmp_path), "--port", "70000"], "between 0"),
        (["watch", __file__], "is no folder"),
    ):
        assert main(args) == 2 and words in capsys.readouterr().err
    with pytest.raises(UserError, match="between 0"):
        longtail.watch(tmp_path, port=-1)


# Real processes


@pytest.fixture
def watching(tmp_path):
    """`longtail watch` as a user starts it, on a folder that is not there yet: the process and its port."""
    command = [sys.executable, "-m", "longtail", "watch", str(tmp_path / "runs"), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    try:
        first = process.stdout.readline()
        yield process, int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/ shows .*; Ctrl-C ends it\n", first)[1])
    finally:
        process.kill()
        process.communicate()


def start_training(out, epochs: int):
    config = tiny("ce", epochs=epochs)
    return start(train, replace(config, data=replace(config.data, val_fraction=0.1)), out)


def test_a_real_run_is_followed_to_its_end(watching, tmp_path):
    process, port = watching
    assert "There is no run yet" in ask(port)[2].decode()
    run, seen, versions = start_training(tmp_path / "runs", 24), [], []
    while run.is_alive():
        page = Page(ask(port)[2].decode())
        seen += [int(row["epoch"][0].split()[0]) for row in under_way(page).values() if " of 24" in row["epoch"][0]]
        versions.append(ask(port, "/version")[2])
        time.sleep(0.2)
    assert run.exitcode == 0 and seen == sorted(seen) and len({*seen} - {0}) >= 2 and len({*versions}) > 2
    time.sleep(1.1)
    page = Page(ask(port)[2].decode())
    metrics = json.loads((tmp_path / "runs/seed0" / runs.METRICS).read_text())
    (results,) = [t for t in page.tables if t[0][-1][0] == "seeds"]
    assert under_way(page) == {} and float(results[1][1][1]) == pytest.approx(metrics["top1"])
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=20)
    assert (process.returncode, said, errors) == (0, "no longer watching; whatever trains goes on\n", "")


@pytest.mark.long
@browser.needed
def test_an_epoch_arrives_in_a_browser_by_itself(watching, tmp_path):
    _, port = watching
    here = f"http://127.0.0.1:{port}/"
    epoch = "[...document.querySelectorAll('td')].map(c => c.innerText).find(t => / of 8/.test(t))"
    with browser.Browser() as chromium:
        chromium.screen(1280)
        chromium.open(here)
        chromium.evaluate("window.same = true")  # a reload would lose it
        assert "There is no run yet" in chromium.evaluate("document.body.innerText")
        for seed in range(3):
            begin(tmp_path / f"runs/a/seed{seed}", 3 - seed, seed=seed)
        make_run(tmp_path / "made", recipes.digits_lt("paco"), 0, COUNTS)
        os.replace(tmp_path / "made", tmp_path / "runs/paco")
        chromium.until(f"{epoch} !== undefined && document.querySelectorAll('h2').length === 3")
        column = "[...document.querySelector('table').tBodies[0].rows].map(r => parseInt(r.cells[1].innerText))"
        chromium.evaluate("document.querySelector('table').tHead.rows[0].cells[1].querySelector('button').click()")
        chromium.until(f"'' + {column} === '3,2,1'")
        folded = "[...document.querySelectorAll('details')].map(d => d.open)"
        chromium.evaluate("document.querySelectorAll('details').forEach(d => d.open = !d.open)")
        chromium.evaluate("document.querySelectorAll('.tall').forEach(t => t.scrollTop = 7)")
        chromium.evaluate("[...document.querySelectorAll('h3')].at(-1).scrollIntoView({behavior: 'instant'})")
        chromium.evaluate("[...document.querySelectorAll('button')].at(-1).focus({preventScroll: true})")
        place = "[...document.querySelectorAll('h3')].at(-1).getBoundingClientRect().top"
        focus = "document.activeElement.innerText"
        before = [chromium.evaluate(what) for what in (place, folded, focus)]
        with open(tmp_path / "runs/a/seed2" / runs.LOG, "a") as log:
            log.writelines(map(line, range(1, 6)))
        begin(tmp_path / "runs/b/seed9", 1, "focal", seed=9)  # above what is being read
        chromium.until(f"'' + {column} === '6,3,2,1'")  # sorted as before
        after = [chromium.evaluate(what) for what in (place, folded, focus)]
        assert after[0] == pytest.approx(before[0], abs=2) and after[1:] == before[1:]
        assert chromium.evaluate("window.same") and re.search(r"\d s ago", chromium.evaluate("document.body.innerText"))
        assert (
            chromium.complaints() == []
            and {u for u in chromium.requests() if not u.startswith(("data:", here))} == set()
        )


@pytest.mark.long
@browser.needed
def test_a_browser_says_when_the_server_has_ended(watching, tmp_path):
    process, port = watching
    begin(tmp_path / "runs/seed0", 2)
    with browser.Browser() as chromium:
        for width in (390, 1280):
            chromium.screen(width)
            chromium.open(f"http://127.0.0.1:{port}/")
            assert chromium.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), width
        assert chromium.complaints() == []
        process.send_signal(signal.SIGINT)
        chromium.until("document.querySelector('.live').innerText.startsWith('No longer live')")
        assert "2 of 8" in chromium.evaluate("document.body.innerText")  # what was there stays
