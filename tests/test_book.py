"""The book as a reader meets it: built with warnings as errors, opened in headless Chromium from the disk."""

import asyncio
import itertools
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tornado.websocket import websocket_connect

from scaleop.paths import BOOK, ROOT
from scaleop.published import PAPER_ARMS

LISTED = re.findall(r"file: *(\S+\.ipynb)", (ROOT / "_toc.yml").read_text())
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-component-update", "--disable-background-networking", "--window-size=1280,1000",
         "--remote-debugging-port=0"]


def test_jupyter_book_is_the_program_that_reads_our_configuration():
    said = subprocess.run([sys.executable, Path(sys.executable).with_name("jb"), "--version"], capture_output=True,
                          text=True, check=True, stdin=subprocess.DEVNULL, timeout=60).stdout
    assert re.search(r"Jupyter Book *: 1\.", said)  # version 2 is another program, green without a page
    assert all((BOOK / name).resolve() == ROOT / name for name in ("_config.yml", "_toc.yml"))


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The built pages, from a copy of book/, so that nothing of an earlier build is taken for this one's."""
    if missing := [name for name in LISTED if not (BOOK / name).exists()]:
        pytest.skip(f"not executed yet: {', '.join(missing)} (make notebooks)")
    work = tmp_path_factory.mktemp("book")
    shutil.copytree(BOOK, work / "book", ignore=shutil.ignore_patterns("_build"))  # links become files
    began = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    built = subprocess.run([sys.executable, Path(sys.executable).with_name("jb"), "build", "book", "-W", "-n",
                            "--keep-going"], cwd=work, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                           timeout=300, check=False)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-4000:]
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - began < 60  # CPU seconds: others may be at work
    return work / "book" / "_build" / "html"


def test_every_listed_page_was_written(html):
    for name in ("index.html", "references.html", *(Path(name).with_suffix(".html") for name in LISTED)):
        assert (html / name).stat().st_size > 2000


class Browser:
    """A page of a Chromium, driven over its debugging protocol; what it complains about is collected."""

    def __init__(self, socket):
        self.socket, self.numbers, self.errors, self.requests = socket, itertools.count(1), [], []

    async def ask(self, method, **parameters):
        """Send a command and return its result; events that arrive before it are noted."""
        number = next(self.numbers)
        await self.socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := await self.receive()).get("id") != number:
            pass
        assert "error" not in message, message
        return message["result"]

    async def receive(self):
        message = json.loads(await asyncio.wait_for(self.socket.read_message(), 60))
        event, said = message.get("method"), message.get("params")
        if event == "Runtime.exceptionThrown" or (event == "Runtime.consoleAPICalled" and said["type"] == "error") \
                or (event == "Log.entryAdded" and said["entry"]["level"] == "error"):
            self.errors.append(json.dumps(said)[:500])
        if event == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        return message

    async def open(self, page):
        """Load a page to its end and give its scripts a moment."""
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.ask(f"{domain}.enable")
        await self.ask("Page.navigate", url=page.as_uri())
        while (await self.receive()).get("method") != "Page.loadEventFired":
            pass
        return await self.evaluate("new Promise(done => setTimeout(done, 500))")

    async def evaluate(self, script):
        """The value of a JavaScript expression."""
        result = await self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")


LOOK = """({
  title: document.querySelector('h1')?.innerText ?? '',
  images: [...document.querySelectorAll('article img, main img')].map(
      image => [image.getAttribute('src'), image.complete, image.naturalWidth, image.getBoundingClientRect().width]),
  tables: [...document.querySelectorAll('article table, main table')].map(
      table => [...table.rows].map(row => [...row.cells].map(cell => cell.innerText.trim()))),
  equations: document.querySelectorAll('.math').length,
  drawn: document.querySelectorAll('mjx-container').length,
  text: document.querySelector('main').innerText,
  links: [...document.querySelectorAll('a[href]')].map(link => link.href),
})"""


async def visit(port_file, pages):
    """{page name: (what LOOK sees, errors, requests)} of each page in turn."""
    deadline = time.monotonic() + 60
    while not (port_file.exists() and len(port_file.read_text().split()) == 2):
        assert time.monotonic() < deadline, "Chromium did not start"
        await asyncio.sleep(0.1)
    port, path = port_file.read_text().split()
    main = Browser(await websocket_connect(f"ws://127.0.0.1:{port}{path}"))
    seen = {}
    for page in pages:
        target = (await main.ask("Target.createTarget", url="about:blank"))["targetId"]
        browser = Browser(await websocket_connect(f"ws://127.0.0.1:{port}/devtools/page/{target}",
                                                  max_message_size=2**26))
        await browser.open(page)
        seen[page.stem] = (await browser.evaluate(LOOK), browser.errors, browser.requests)
        browser.socket.close()
    main.socket.close()
    return seen


@pytest.fixture(scope="module")
def pages(html):
    """Every page as Chromium shows it."""
    if not (chromium := shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")):
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(prefix="scaleop-chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen([chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            names = ["index", *(Path(name).stem for name in LISTED), "references"]
            return asyncio.run(visit(Path(profile) / "DevToolsActivePort", [html / f"{name}.html" for name in names]))
        finally:
            process.terminate()
            process.wait(20)


def test_pages_open_without_errors_and_without_a_network(pages):
    for name, (look, errors, requests) in pages.items():
        assert errors == [], name
        assert len(requests) > 3 and all(url.startswith(("file:", "data:", "blob:")) for url in requests), name
        assert len(look["title"]) > 3, name


def test_links_between_pages_lead_somewhere(pages):
    local = {link.split("#")[0] for look, _, _ in pages.values() for link in look["links"] if link.startswith("file:")}
    assert any(link.endswith("07_race.html") for link in local)
    assert [link for link in local if not Path(link.removeprefix("file://").split("?")[0]).exists()] == []


def test_equations_are_drawn(pages):
    for name, (look, _, _) in pages.items():
        assert look["drawn"] >= look["equations"], name


def test_every_figure_is_loaded_and_visible(pages):
    for name, (look, _, _) in pages.items():
        for source, complete, natural, shown in look["images"]:
            assert complete and natural > 0 and (shown > 0 or "logo" in source), (name, source)


def test_section_7_shows_the_ladder_table_and_its_figures(pages):
    look, _, _ = pages["07_race"]
    ladder = next(table for table in look["tables"] if {"arm", "final, ours", "final, paper"} <= set(table[0]))
    header, rows = ladder[0], {row[0]: row for row in ladder[1:]}
    for arm in PAPER_ARMS:
        zero_shot, final = (rows[arm][header.index(f"{kind}, ours")] for kind in ("zero-shot", "final"))
        assert float(zero_shot.replace(",", "")) > float(final.replace(",", "")) > 1, arm
        assert re.match(r"[\d,.]+", rows[arm][header.index("final, paper")]), arm
    figures = [image for image in look["images"] if image[2] > 300]
    assert len(figures) >= 2  # recovery, and the two levers


def test_section_7_says_of_each_claim_whether_it_holds(pages):
    look, _, _ = pages["07_race"]
    verdicts = [cell for table in look["tables"] for row in table for cell in row
                if cell in ("holds", "does not hold", "not run")]
    assert len(verdicts) >= 5


def test_no_traceback_and_no_progress_bar_is_on_any_page(pages):
    for name, (look, _, _) in pages.items():
        assert not re.search(r"Traceback|it/s\]|%\|", look["text"]), name
