"""Tests of `longtail watch`: which requests are answered, and following real training runs."""

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
from longtail import recipes, run_folder
from longtail.engine.loggers import Log
from longtail.engine.train import train
from longtail.reporting import server
from longtail.reporting.page import content_security_policy
from tests.conftest import tiny
from tests.processes import start
from tests.raises import fails, raises
from tests.report import browser
from tests.report.made import FEW, Page, begin_run, log_line, make_run, under_way


@pytest.fixture
def served(tmp_path):
    """A server in this process with one run."""
    begin_run(tmp_path / "runs/seed0", 2)
    with server.open_server([tmp_path / "runs"], 0) as here:
        threading.Thread(target=here.serve_forever, args=(0.02,), daemon=True).start()
        yield here
        here.shutdown()


def ask(port: int, path: str = "/", method: str = "GET", headers=None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=headers is not None)
    for key, value in headers or ():
        connection.putheader(key, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_page_and_version(served):
    for path, kind in (("/", "text/html"), ("/version", "text/plain")):
        status, headers, body = ask(served.port, path)
        assert status == 200 and body and headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
        *rules, last = headers["Content-Security-Policy"].split("; ")
        assert "; ".join(rules) == content_security_policy(live=True) and last == "frame-ancestors 'none'"
        assert "Python" not in headers["Server"]
        head_status, head, nothing = ask(served.port, path, "HEAD")
        assert (head_status, nothing, head["Content-Length"]) == (200, b"", str(len(body)))
    page = Page(ask(served.port)[2].decode())
    (inner,) = [a["content"] for a in page.of("meta") if a.get("http-equiv")]
    assert (
        inner == content_security_policy(live=True)
        and "connect-src 'self'" in inner
        and "connect-src" not in content_security_policy()
    )
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
def test_other_paths_are_not_found(served, path):
    status, headers, body = ask(served.port, path)
    assert (status, body) == (404, b"not found: the page is at /") and headers["Content-Type"].startswith("text/plain")


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
def test_host_header_must_name_this_machine(served, hosts, status):
    given = [("Host", host.format(served.port)) for host in hosts]
    for path in ("/", "/version"):
        found, _, body = ask(served.port, path, headers=given)
        assert found == status and (status == 200 or b"http://127.0.0.1" in body)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(served, method):
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
def test_malformed_requests_are_refused(served, request_line, status):
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as raw:
        raw.sendall(request_line + b"\r\n\r\n")
        answer = raw.makefile("rb").read()
    assert status in answer.splitlines()[0] and b"<" not in answer
    with socket.create_connection(("127.0.0.1", served.port)) as gone:
        gone.sendall(b"GET / HT")  # and leaves
    assert ask(served.port)[0] == 200


def test_listens_on_loopback_only(served):
    assert served.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", served.port), timeout=5)


def test_concurrent_readers_share_one_page(served, monkeypatch):
    calls, made = [], server.unfinished_section
    monkeypatch.setattr(server, "unfinished_section", lambda begun: calls.append(1) or time.sleep(0.2) or made(begun))
    found = []
    readers = [threading.Thread(target=lambda: found.append(ask(served.port)[2])) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
    assert len(found) == 8 and len({*found}) == 1 and calls == [1]


def test_invalid_arguments_are_user_errors(served, tmp_path, capsys):
    taken = str(served.port)
    fails(capsys, ["watch", str(tmp_path), "--port", taken], "not-writable", f"--port {taken}", "--port 0")
    fails(capsys, ["watch"], "invalid-value", "longtail watch")
    fails(capsys, ["watch", str(tmp_path), "--port", "70000"], "invalid-value", "--port 70000", "65535")
    fails(capsys, ["watch", __file__], "invalid-value", __file__)
    with raises("invalid-value", "--port -1", "65535"):
        longtail.watch(tmp_path, port=-1)


# Real processes


@pytest.fixture
def watching(tmp_path):
    """A `longtail watch` process on a folder that does not exist yet, and its port."""
    command = [sys.executable, "-m", "longtail", "watch", str(tmp_path / "runs"), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    try:
        first = process.stdout.readline()
        yield process, int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/ shows .*; press Ctrl-C to stop\n", first)[1])
    finally:
        process.kill()
        process.communicate()


def start_training(out, epochs: int):
    config = tiny("ce", epochs=epochs)
    return start(train_slowly, replace(config, data=replace(config.data, val_fraction=0.1)), out)


def train_slowly(*args) -> None:
    """Train with 0.1 s more per epoch; otherwise fast machines finish between two scans."""
    told = Log.epoch
    Log.epoch = lambda *news: time.sleep(0.1) or told(*news)
    train(*args)


@pytest.mark.long
def test_follow_real_run(watching, tmp_path):
    process, port = watching
    assert under_way(Page(ask(port)[2].decode())) == {}
    run, seen, versions = start_training(tmp_path / "runs", 24), [], []
    while run.is_alive():
        page = Page(ask(port)[2].decode())
        seen += [int(row["epoch"][0].split()[0]) for row in under_way(page).values() if " of 24" in row["epoch"][0]]
        versions.append(ask(port, "/version")[2])
        time.sleep(0.2)
    assert run.exitcode == 0 and seen == sorted(seen) and len({*seen} - {0}) >= 2 and len({*versions}) > 2
    time.sleep(1.1)
    page = Page(ask(port)[2].decode())
    metrics = json.loads((tmp_path / "runs/seed0" / run_folder.METRICS).read_text())
    (results,) = [t for t in page.tables if t[0][-1][0] == "seeds"]
    assert under_way(page) == {} and float(results[1][1][1]) == pytest.approx(metrics["top1"])
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=20)
    assert (process.returncode, said.count("\n"), errors) == (0, 1, "")


def test_process_shows_new_run_and_stops_at_ctrl_c(watching, tmp_path):
    process, port = watching
    assert under_way(Page(ask(port)[2].decode())) == {}
    begin_run(tmp_path / "runs/seed0", 2)
    time.sleep(1.1)  # it styles once a second
    assert len(under_way(Page(ask(port)[2].decode()))) == 1
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=20)
    assert (process.returncode, said.count("\n"), errors) == (0, 1, "")


@pytest.mark.long
@browser.needed
def test_browser_updates_automatically(watching, tmp_path):
    _, port = watching
    here = f"http://127.0.0.1:{port}/"
    epoch = "[...document.querySelectorAll('td')].map(c => c.innerText).find(t => / of 8/.test(t))"
    with browser.Browser() as chromium:
        chromium.screen(1280)
        chromium.open(here)
        chromium.evaluate("window.same = true")  # a reload would lose it
        assert chromium.evaluate(f"{epoch} === undefined")
        for seed in range(3):
            begin_run(tmp_path / f"runs/a/seed{seed}", 3 - seed, seed=seed)
        make_run(tmp_path / "made", recipes.digits_lt("paco"), 0, FEW)
        os.replace(tmp_path / "made", tmp_path / "runs/paco")
        chromium.until(f"{epoch} !== undefined && document.querySelectorAll('h2').length === 3")
        column = "[...document.querySelector('table').tBodies[0].rows].map(r => parseInt(r.cells[2].innerText))"
        chromium.evaluate("document.querySelector('table').tHead.rows[0].cells[2].querySelector('button').click()")
        chromium.until(f"'' + {column} === '3,2,1'")
        folded = "[...document.querySelectorAll('details')].map(d => d.open)"
        chromium.evaluate("document.querySelectorAll('details').forEach(d => d.open = !d.open)")
        chromium.evaluate("document.querySelectorAll('.tall').forEach(t => t.scrollTop = 7)")
        chromium.evaluate("[...document.querySelectorAll('h3')].at(-1).scrollIntoView({behavior: 'instant'})")
        chromium.evaluate("[...document.querySelectorAll('button')].at(-1).focus({preventScroll: true})")
        place = "[...document.querySelectorAll('h3')].at(-1).getBoundingClientRect().top"
        focus = "document.activeElement.innerText"
        before = [chromium.evaluate(what) for what in (place, folded, focus)]
        with open(tmp_path / "runs/a/seed2" / run_folder.LOG, "a") as log:
            log.writelines(map(log_line, range(1, 6)))
        begin_run(tmp_path / "runs/b/seed9", 1, "focal", seed=9)  # above what is being read
        chromium.until(f"'' + {column} === '6,3,2,1'")  # sorted as before
        after = [chromium.evaluate(what) for what in (place, folded, focus)]
        assert after[0] == pytest.approx(before[0], abs=2) and after[1:] == before[1:]
        assert chromium.evaluate("window.same") and re.search(r"\d s\b", chromium.evaluate("document.body.innerText"))
        assert (
            chromium.complaints() == []
            and {u for u in chromium.requests() if not u.startswith(("data:", here))} == set()
        )


@pytest.mark.long
@browser.needed
def test_browser_shows_that_server_has_stopped(watching, tmp_path):
    process, port = watching
    begin_run(tmp_path / "runs/seed0", 2)
    with browser.Browser() as chromium:
        for width in (390, 1280):
            chromium.screen(width)
            chromium.open(f"http://127.0.0.1:{port}/")
            assert chromium.evaluate(browser.FITS), width
        assert chromium.complaints() == []
        process.send_signal(signal.SIGINT)
        chromium.until("document.querySelector('.live').innerText.startsWith('No longer live')")
        assert "2 of" in chromium.evaluate("document.body.innerText")  # what was there stays
