"""TensorBoard and the report in a real browser."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from grpo_megatron.cli import main
from grpo_megatron.config.schema import Config
from grpo_megatron.monitoring.charts import SECTIONS
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.samples import TrainedOn
from grpo_megatron.monitoring.status import StatusFile
from tests.unit.scored_groups import group
from tests.unit.shown_runs import Talk, run_with

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no chromium on this machine (apt-get install chromium)"
    ),
]
# It would show in the title that markup of a response has been taken for some.
ATTACK = (
    "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"># **no** heading"
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser") / "run"
    folder.mkdir()
    config = Config()
    config.run.total_steps, config.model.path, config.monitor.samples_every = 5, "m", 1
    with StatusFile(str(folder), "run", 5) as status:
        monitor = Monitor(str(folder), config, status)
        monitor.open()
        for step in range(1, 6):
            groups = [group(step, (0.0, 1.0), ATTACK)]
            lengths = np.array([sample.num_tokens for one in groups for sample in one.samples])
            monitor.start_step(step)
            with monitor.phases("train"):
                time.sleep(0.01)
            monitor.finish_step(
                step,
                {"reward/mean": step / 5, "mismatch/max": 1e-6, "actor/entropy": np.exp(-step)},
                TrainedOn(lengths, groups=groups),
            )
        monitor.close()
    return folder


# The text of the page, that of its components' shadow trees included, which no dump of the DOM has.
_TEXT = """
(() => {
  const children = node => [...(node.shadowRoot ? [node.shadowRoot] : []), ...node.childNodes];
  const text = node => node.nodeType === Node.TEXT_NODE ? node.data
    : ["STYLE", "SCRIPT", "TEMPLATE"].includes(node.nodeName) ? "" : children(node).map(text).join(" ");
  return document.title + " " + text(document.body);
})()
"""


async def _text_with(address: str, folder: Path, wanted: list[str], expression: str) -> str:
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1600,2000",
        f"--user-data-dir={folder}",
    ]
    browser = subprocess.Popen(
        [CHROMIUM, *arguments, "--remote-debugging-port=0", address], stderr=subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(200), aiohttp.ClientSession() as session:
            while not (port := folder / "DevToolsActivePort").exists() or not port.read_text():
                await asyncio.sleep(0.1)
            where = f"http://127.0.0.1:{port.read_text().split()[0]}/json"
            while not (
                pages := [page for page in await (await session.get(where)).json() if page["type"] == "page"]
            ):
                await asyncio.sleep(0.1)
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as page:
                text, end = "", asyncio.get_running_loop().time() + 120
                while any(part not in text for part in wanted) and asyncio.get_running_loop().time() < end:
                    await asyncio.sleep(0.5)
                    await page.send_json(
                        {"id": 1, "method": "Runtime.evaluate", "params": {"expression": expression}}
                    )
                    answer = (await page.receive_json())["result"]["result"]
                    text = " ".join(answer.get("value", "").split())
                return text
    finally:
        browser.kill()
        browser.wait()


def seen(address: str, folder: Path, wanted: list[str], expression: str = _TEXT) -> str:
    """Return the title and text of a page once it has everything wanted, or after two minutes.

    folder: the browser's profile.
    expression: the JavaScript expression that returns the text.
    """
    return asyncio.run(_text_with(address, folder, wanted, expression))


@pytest.fixture(scope="module")
def tensorboard(run_folder):
    """Address of a TensorBoard that has read the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    host, port = address.split(":")
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(run_folder / "tensorboard"),
        "--host",
        host,
        "--port",
        port,
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not _has_layout(address):
            assert server.poll() is None
            assert time.monotonic() < end
            time.sleep(0.5)
        yield f"http://{address}"
    finally:
        server.kill()
        server.wait()


def _has_layout(address: str) -> bool:
    try:
        with urllib.request.urlopen(
            f"http://{address}/data/plugin/custom_scalars/layout", timeout=30
        ) as answer:
            return bool(json.load(answer))
    except (urllib.error.URLError, ConnectionError):
        return False


def test_tensorboard_has_the_layout(tensorboard, tmp_path):
    # The first section is open: its charts are there, and those of which there are scalars say of how many.
    wanted = [*SECTIONS, *(chart.title for chart in SECTIONS["Learning"]), "Matches (1)"]
    text = seen(f"{tensorboard}/#custom_scalars", tmp_path, wanted)
    assert [part for part in wanted if part not in text] == []


def test_tensorboard_shows_samples_as_they_are(tensorboard, tmp_path):
    text = seen(f"{tensorboard}/#text", tmp_path, [ATTACK])
    assert ATTACK in text
    assert not text.startswith("taken")


def test_the_report_needs_nothing_and_runs_nothing(run_folder, tmp_path):
    out = tmp_path / "report.html"
    assert main(["report", str(run_folder), "--out", str(out)]) == 0
    text = seen(out.as_uri(), tmp_path / "profile", [ATTACK, "Configuration"])
    assert text.startswith("run ")
    assert ATTACK in text
    assert "reward/mean 1" in text  # the legend of a chart


_OPEN = """
(() => {
  const turn = document.querySelectorAll("details.node.written")[0];
  const hidden = !turn.querySelector("pre").checkVisibility();
  document.querySelectorAll("summary").forEach(one => one.parentElement.open || one.click());
  const shown = turn.querySelector("pre").checkVisibility();
  return "hidden " + hidden + ", shown " + shown + ", " + document.title + " " + document.body.innerText;
})()
"""


def test_a_turn_of_a_tree_opens_and_runs_nothing(tmp_path):
    talk = Talk(ATTACK).turn(ATTACK, f"turn one {ATTACK}").turn(f"{ATTACK}turn one {ATTACK}?", "turn two")
    folder = run_with(tmp_path / "run", (3, talk.shown()))
    assert main(["report", str(folder)]) == 0
    address = (folder / "report.html").as_uri()
    text = seen(address, tmp_path / "profile", ["turn two"], _OPEN)
    assert text.startswith("hidden true, shown true, run ")
    assert f"turn one {ATTACK}" in text
    # A link to the trajectory unfolds it.
    visible = "document.querySelectorAll('details.node.written pre')[0].checkVisibility() + ''"
    assert seen(f"{address}#step-3-sample-12", tmp_path / "other", ["true"], visible) == "true"
