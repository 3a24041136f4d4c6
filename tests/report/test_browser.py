"""The page in headless Chromium: nothing runs, nothing loads, everything is drawn.

Skipped where there is no Chromium (Debian: `apt install chromium`). The control test shows
that the same checks do find a script that ran into the policy and a load that was refused.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_run import write_run
from test_page import Tags, write_evil_run

from scrimp.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="NOT RUN: no Chromium on this machine (apt install chromium)"
    ),
]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=2000",
]  # fmt: skip


@dataclass
class Visit:
    """What a browser did with a page."""

    dom: str
    console: list[str]
    urls: list[str]
    """Everything the page asked the network for."""


def visit(page: Path, scratch: Path, *flags: str) -> Visit:
    """Open a page with a fresh profile and let it settle."""
    assert CHROMIUM
    net_log = scratch / "net.json"
    command = [
        CHROMIUM, *FLAGS, f"--user-data-dir={scratch / 'profile'}", f"--log-net-log={net_log}", *flags,
        "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = json.loads(net_log.read_text())["events"]
    requests = [event.get("params", {}) for event in events]
    # What the browser asks for on its own behalf has "not an origin" as its initiator.
    urls = [asked["url"] for asked in requests if asked.get("initiator", "not an origin") != "not an origin"]
    return Visit(done.stdout, console, urls)


def drive(page: Path, scratch: Path, script: str, *flags: str) -> Any:
    """What `script` leaves in `seen`, run in a page; the policy is opened for it."""
    text = page.read_text(encoding="utf-8").replace("script-src", "script-src 'unsafe-inline'; x-", 1)
    leave = (
        "const pre = document.createElement('pre'); pre.id = 'seen'; pre.textContent = JSON.stringify(seen);"
    )
    wrapped = f"(async () => {{ const seen = {{}};{script};{leave} document.body.append(pre); }})()"
    driven = scratch / "driven.html"
    driven.write_text(text.replace("</body>", f"<script>{wrapped}</script></body>"), encoding="utf-8")
    dom = visit(driven, scratch, *flags).dom
    return json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)[1]))


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory):
    return write_report(write_evil_run(tmp_path_factory.mktemp("evil") / "run"))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(write_run(tmp_path_factory.mktemp("plain") / "run", 200))


def test_text_from_outside_does_not_run_and_nothing_is_loaded(evil_page, tmp_path):
    seen = visit(evil_page, tmp_path)
    assert "<title>run · Scrimp run</title>" in seen.dom
    assert seen.console == []
    assert seen.urls == []
    assert seen.dom.count("<img") == 0


@pytest.mark.slow
def test_text_that_got_past_the_escape_would_be_stopped_and_seen(evil_page, tmp_path):
    """The control: both the policy and these tests' own eyes work."""
    hole = "<script>document.title='ran'</script><img src='http://127.0.0.1:9/x'><p onclick='1' style='color:red'>"
    text = evil_page.read_text(encoding="utf-8").replace("</main>", hole + "</main>")
    control = tmp_path / "control.html"
    control.write_text(text, encoding="utf-8")
    seen = visit(control, tmp_path)
    assert "<title>run · Scrimp run</title>" in seen.dom
    assert len([line for line in seen.console if "Content Security Policy" in line]) >= 3
    assert not any("127.0.0.1" in url for url in seen.urls)
    opened = text.replace("script-src", "script-src 'unsafe-inline'; x-").replace(
        "default-src 'none'", "img-src *"
    )
    control.write_text(opened, encoding="utf-8")
    seen = visit(control, tmp_path / "open")
    assert "<title>ran</title>" in seen.dom
    assert any("127.0.0.1" in url for url in seen.urls)


@pytest.mark.slow
def test_without_scripts_the_page_is_complete_but_for_the_charts(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL), encoding="utf-8")
    seen = visit(bare, tmp_path)
    assert seen.console == []
    assert [tag for tag, _ in Tags(seen.dom).found] == [tag for tag, _ in Tags(bare.read_text()).found]
    assert "<canvas" not in seen.dom
    assert text.count("<noscript><p") == 1
    assert text.count("<summary>Values</summary>") == text.count("data-chart=") == 7


@pytest.mark.slow
def test_a_browser_without_scripts_says_what_needs_them(page, tmp_path):
    harness = tmp_path / "harness.html"
    frame = f'<iframe sandbox="allow-same-origin" src="{page.as_uri()}" width="900" height="1500"></iframe>'
    script = (
        "onload = () => { document.title = document.querySelector('iframe').contentDocument.body.innerText }"
    )
    harness.write_text(f"<!doctype html><body>{frame}<script>{script}</script>")
    seen = visit(harness, tmp_path, "--allow-file-access-from-files")
    title = re.search(r"<title>(.*?)</title>", seen.dom, re.DOTALL)[1]
    assert "The charts need JavaScript." in title
    assert "Cross-entropy in nats per token" in title
    assert "Drag over a chart" not in title
    assert "logarithmic steps" not in title


@pytest.mark.slow
def test_nothing_is_wider_than_a_phone(page, evil_page, tmp_path):
    harness = tmp_path / "harness.html"
    frames = "".join(
        f'<iframe src="{path.as_uri()}" width="380" height="900"></iframe>' for path in (page, evil_page)
    )
    script = (
        "onload = () => { document.title = [...document.querySelectorAll('iframe')]"
        ".map(f => f.contentDocument.documentElement.scrollWidth).join(' ') }"
    )
    harness.write_text(f"<!doctype html><body>{frames}<script>{script}</script>")
    seen = visit(harness, tmp_path, "--allow-file-access-from-files")
    widths = re.findall(r"<title>([\d ]+)</title>", seen.dom)
    assert widths
    assert all(0 < int(width) <= 380 for width in widths[0].split())


@pytest.mark.slow
def test_it_can_be_painted(page, tmp_path):
    assert CHROMIUM
    shot = tmp_path / "page.png"
    command = [
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--screenshot={shot}",
        page.as_uri(),
    ]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 20_000
