"""The page in a headless Chromium, where playwright and a chromium are there: every view is clicked through, at two
widths; nothing overlaps, nothing is clipped, nothing of a run acts. RL_JAX_SCREENSHOTS=DIRECTORY keeps the pictures."""

import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from rl_jax.names import resolve
from rl_jax.testing.generated_run import HOSTILE, write_run
from rl_jax.viewer import export
from rl_jax.viewer.api import Api
from rl_jax.viewer.server import Server

pytestmark = pytest.mark.slow(seconds=12)
WIDTHS = (1280, 390)
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f]")

# Where text is not whole: outside of the window, cut by what holds it, or on other text. At most 20 lines.
LAYOUT = """() => {
  const faults = [], boxes = [], width = document.documentElement.clientWidth;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const holder = node.parentElement;
    if (!node.data.trim() || !holder.checkVisibility() || holder.closest('option, script, noscript, #tip')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    rects: for (const r of range.getClientRects()) {
      if (r.width < 1 || r.height < 1) continue;
      const said = node.data.trim().slice(0, 30);
      if (r.left < -1 || r.right > width + 1) faults.push(`outside: ${said} ${r.left} ${r.right}`);
      for (let up = holder; up && up !== document.body; up = up.parentElement) {
        const style = getComputedStyle(up), b = up.getBoundingClientRect();
        if (style.overflowX !== 'visible' && up.tagName !== 'svg' && (r.left < b.left - 1.5 || r.right > b.right + 1.5))
          faults.push(`clipped: ${said} by ${up.tagName}.${up.className}`);
        if (['auto', 'scroll'].includes(style.overflowY) && (r.top < b.top || r.bottom > b.bottom)) continue rects;
        if (style.overflowY === 'hidden' && up.tagName !== 'svg' && (r.top < b.top - 3 || r.bottom > b.bottom + 3))
          faults.push(`clipped: ${said} by ${up.tagName}.${up.className}`);
      }
      boxes.push([r.top + 3, r.bottom - 3, r.left + 1, r.right - 1, said, node]);
    }
  }
  boxes.sort((a, b) => a[0] - b[0]);
  for (let i = 0; i < boxes.length; i++)
    for (let j = i + 1; j < boxes.length && boxes[j][0] < boxes[i][1]; j++)
      if (boxes[i][5] !== boxes[j][5] && boxes[j][2] < boxes[i][3] && boxes[i][2] < boxes[j][3])
        faults.push(`overlap: ${boxes[i][4]} | ${boxes[j][4]}`);
  for (const element of document.querySelectorAll('button, select, input, a.button')) {
    if (element.tagName !== 'SELECT' && element.scrollWidth > element.clientWidth + 2)
      faults.push(`clipped: ${element.tagName} ${element.textContent}`);
  }
  if (document.documentElement.scrollWidth > width) faults.push(`wide: ${document.documentElement.scrollWidth}`);
  return faults.slice(0, 20);
}"""


@pytest.fixture(scope="module")
def served():
    """path of a run -> its address."""
    open_, servers = {}, []

    def serve(path):
        if path not in open_:
            server = Server(Api(path, resolve))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            servers.append(server)
            open_[path] = server.url
        return open_[path]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


class Visit:
    """One window on one run; `look` is what each view has to pass."""

    def __init__(self, browser, url, width, pictures):
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.faults, self.width, self.pictures, self.url = [], width, pictures, url
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.faults.append("dialog"), dialog.dismiss()))
        self.page.goto(url)

    def view(self, name):
        self.page.locator(f".view[data-view={name}][data-ready]").wait_for()

    def look(self, name):
        """The layout of the view as it is now, and its picture."""
        self.page.mouse.move(0, 0)
        self.page.wait_for_timeout(120)  # curves are drawn when they come into sight
        self.page.evaluate("window.scrollTo(0, 0)")
        self.page.screenshot(path=self.pictures / f"{name}_{self.width}.png")
        assert self.page.evaluate(LAYOUT) == [], name
        assert self.page.locator(".note.bad").all_text_contents() == []

    def tab(self, name):
        self.page.locator("#tabs").get_by_role("link", name=name, exact=True).click()

    def close(self):
        assert self.faults == []
        self.page.close()


@pytest.fixture
def visit(browser, tmp_path):
    pictures = Path(os.environ.get("RL_JAX_SCREENSHOTS") or tmp_path)
    pictures.mkdir(parents=True, exist_ok=True)
    made = []

    def open_(url, width=1280):
        made.append(Visit(browser, url, width, pictures))
        return made[-1]

    yield open_
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def shown_run(tmp_path_factory):
    """With an alarm at its last steps."""
    path = write_run(tmp_path_factory.mktemp("runs") / "maze-grpo", 20, 6, 8)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows[-6:]:
        if "is/ess" in row:
            row.update(
                {"is/ess": 0.24, "alarm/ess": 1, "policy/entropy": 0.04, "perf/train_mfu": 0.1}
            )
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("width", WIDTHS)
def test_every_view_can_be_reached_by_clicks_and_is_whole(visit, served, shown_run, width):
    seen = visit(served(shown_run), width)
    page = seen.page
    seen.view("run")
    assert page.title() == "maze-grpo \u00b7 rl_jax"
    advice = page.locator(".advice .line")
    assert advice.count() == 2 and "a few tokens carry" in advice.first.text_content()
    page.locator(".chart svg polyline").first.wait_for()
    seen.look("run")
    page.fill(".find", "abs mismatch")
    page.locator("section[aria-label=reward]").wait_for(state="detached")
    assert {e.get_attribute("data-family") for e in page.query_selector_all(".chart")} == {
        "mismatch/abs_mean",
        "mismatch/abs_mean_lag{n}_pure",
    }
    _metric_and_step(seen)
    _episode_and_two(seen)
    _list(seen)
    _rest(seen)


def _metric_and_step(seen):
    """One metric, and from its chart the step under the pointer."""
    page = seen.page
    page.locator(".tile", has_text="reward/mean").click()
    seen.view("metric")
    page.hover(".plot svg")
    assert re.match(r"step \d+\n", page.text_content("#tip")) and "maze" in page.text_content(
        "#tip"
    )
    seen.look("metric")
    page.get_by_role("button", name="log", exact=True).click()
    page.locator("button[aria-pressed=true]", has_text="log").wait_for()
    seen.view("metric")
    page.click(".plot svg")
    seen.view("step")
    assert (
        page.locator("article.group").count() == 6 and page.locator(".group a.cell").count() == 48
    )
    page.click("#tools")
    page.locator("summary", has_text="examples").first.click()
    seen.look("step")


def _episode_and_two(seen):
    """An episode, its tokens in each colour, the next member, and two side by side."""
    page = seen.page
    page.locator(".group a.cell").nth(9).click()
    seen.view("episode")
    for label, css in (
        ("advantage", ".p1, .p2, .p3, .n1, .n2, .n3, .z"),
        ("mask", ".trained"),
        ("version", ".v0, .v1, .v2"),
        ("plain", ""),
        ("log-prob", ".q0"),
    ):
        page.get_by_role("button", name=label, exact=True).click()
        if css:
            assert page.locator(f".turn .token:is({css})").count() > 10, label
        if label in ("advantage", "version"):
            seen.look(f"episode_{label}")
    page.hover(".turn .token >> nth=3")
    told = page.text_content("#tip")
    assert all(word in told for word in ("log-prob", "advantage", "trained", "version", "id"))
    page.click("summary:has-text('raw bytes')")
    page.locator("pre.raw", has_text='{"uid":"generated/train/').wait_for()
    seen.look("episode")
    here = page.url
    page.keyboard.press("ArrowRight")
    page.locator(".crumbs", has_text="episode 10").wait_for()
    assert page.url != here
    page.click("#compare")
    seen.view("diff")
    assert page.locator(".sides .turn").count() >= 2
    seen.look("diff")


def _list(seen):
    """The histogram is a filter; so are tags; lists are sorted and paged."""
    page = seen.page
    seen.tab("Episodes")
    seen.view("episodes")
    page.locator(".count", has_text="960 of 960 episodes").wait_for()
    seen.look("episodes")
    box = page.locator(".histogram svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 3, box["y"] + 40)
    page.locator(".bin:not(.in)").first.wait_for()
    assert "lo=0.975" in page.url and "hi=1" in page.url
    assert {text.strip() for text in page.locator("tr.row .reward").all_text_contents()} == {"1"}
    page.mouse.click(box["x"] + 3, box["y"] + 40)
    page.locator(".reward", has_text=re.compile("^1$")).first.wait_for(state="detached")
    shown = {float(text) for text in page.locator("tr.row .reward").all_text_contents()}
    assert 0.0 in shown and max(shown) <= 0.025
    page.get_by_role("button", name="clear").click()
    page.locator(".count", has_text="960 of 960").wait_for()
    page.select_option("select[aria-label=tag]", "sums")
    page.locator(".count", has_text="480 of 960").wait_for()
    page.locator("th button", has_text="tokens").click()
    page.locator("th[aria-sort=descending]").wait_for()
    page.click("#later")
    page.locator(".pager", has_text="51\u2013100 of 480").wait_for()
    page.get_by_role("button", name="steps", exact=True).click()
    page.locator("th", has_text="mean reward").wait_for()
    assert page.locator("tr.row").count() == 20
    seen.look("steps")
    page.locator("tr.row").nth(3).click()
    seen.view("step")


def _rest(seen):
    """What was lost, events, keys."""
    page = seen.page
    seen.tab("Failures")
    seen.view("failures")
    page.locator("tr.kindrow", has_text="env_timeout").click()
    page.locator("tr.examples li", has_text="generated/lost/").first.wait_for()
    seen.look("failures")
    seen.tab("Events")
    seen.view("events")
    assert page.locator(".events li").count() == 11
    page.select_option("select[aria-label=kind]", "alarm")
    page.locator(".events li", has_text="saved").first.wait_for(state="detached")
    page.locator(".events li").first.wait_for()
    assert page.locator(".events li").count() == 1
    page.select_option("select[aria-label=kind]", "")
    page.locator(".events li").nth(10).wait_for()
    seen.look("events")
    page.keyboard.press("?")
    seen.view("keys")
    seen.look("keys")


def test_keys_move_through_the_list_and_the_address_names_the_view(visit, served, shown_run):
    seen = visit(served(shown_run) + "#/episodes?lo=0.5&sort=-length")
    page = seen.page
    seen.view("episodes")
    page.locator(".count", has_text=re.compile(r"of 960 episodes, mean reward [^ ]+$")).wait_for()
    for key in "jjk":
        page.keyboard.press(key)
    at = "[...document.querySelectorAll('tr.row')].indexOf(document.activeElement)"
    assert page.evaluate(at) == 0
    page.keyboard.press("j")
    page.evaluate("[...episodesOf('train').listeners].forEach((draw) => draw())")  # more has come
    assert page.evaluate(at) == 1
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    seen.view("episode")
    page.keyboard.press("c")
    assert "color=advantage" in page.url
    page.reload()
    seen.view("episode")
    assert page.locator("button[aria-pressed=true]").text_content() == "advantage"
    page.keyboard.press("u")
    seen.view("step")
    page.keyboard.press("1")
    seen.view("run")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_of_a_hostile_run_acts(visit, served, hostile, width):
    seen = visit(served(hostile), width)
    page = seen.page
    views = (
        "run",
        "episodes",
        "step/5/train",
        "episode/5/train/0",
        "diff/5/train/0/5/train/1",
        "failures",
        "events",
    )
    told = ""
    for name in views:
        page.goto(f"{seen.url}#/{name}")
        seen.view(name.split("/")[0])
        page.wait_for_timeout(150)
        seen.look(f"hostile_{name.split('/')[0]}")
        text = page.evaluate("document.body.textContent")
        assert ACTS.search(text.replace("\r", "\x00")) is None
        told += text
        assert page.title() == "hostile \u00b7 rl_jax"
        assert (
            page.locator("main img, main script, main iframe, main b:has-text('{{x}}')").count()
            == 0
        )
    for said in (
        HOSTILE[0],
        "\u27e81b\u27e9[31mred",
        "\u27e8d83d\u27e9",
        "\u27e8202e\u27e9right",
        "</textarea></pre>--> &lt;b&gt;",
    ):
        assert said in told, said


def test_a_run_that_goes_on_is_looked_at_again(visit, served, copy):
    (copy / "STATUS.json").write_text(json.dumps({"state": "running", "step": 12, "time": 4e9}))
    seen = visit(served(copy))
    seen.view("run")
    assert "running \u00b7 step 12 of 12" in seen.page.text_content("#state")
    seen.page.goto(seen.url + "#/episodes")
    seen.page.locator(".count", has_text="192 of 192").wait_for()
    shutil.copytree(copy / "rollouts" / "step_12", copy / "rollouts" / "step_13")
    with open(copy / "metrics.jsonl", "a") as out:
        out.write(
            '{"step": 13, "time": 4e9, "attempt": 0, "time/step_s": 2.0, "reward/mean": 0.5}\n'
        )
    seen.page.locator("#state", has_text="step 13").wait_for(timeout=15_000)
    seen.page.locator(".count", has_text="208 of 208").wait_for(timeout=15_000)
    with open(copy / "metrics.jsonl", "a") as out:
        out.write('{"step": 14, "time": 4e9, "attempt": 0, "time/step_s": 2.0}\n')
    seen.page.locator("#state", has_text="step 14").wait_for(timeout=15_000)


def test_what_cannot_be_read_is_told_in_its_view(visit, served, copy):
    (copy / "rollouts" / "step_5" / "train" / "index.npz").write_bytes(b"torn")
    with open(copy / "metrics.jsonl", "a") as out:
        out.write("no json\n")
    seen = visit(served(copy))
    seen.view("run")
    assert "metrics.jsonl: 1 of" in seen.page.text_content(".faults")
    seen.page.goto(seen.url + "#/episodes")
    seen.page.locator(".count", has_text="176 of 176").wait_for()
    seen.page.goto(seen.url + "#/episode/5/train/0")
    seen.page.locator(
        ".note.bad", has_text="step_5/train/index.npz cannot be read"
    ).first.wait_for()
    seen.faults.clear()  # Chromium logs the answers that were no 200


def test_one_exported_file_has_every_view_without_a_server(visit, shown_run, tmp_path):
    path = tmp_path / "one.html"
    export.write(Api(shown_run, resolve), path, 1_500_000)
    seen = visit(path.as_uri(), 390)
    page = seen.page
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    seen.view("run")
    page.locator(".chart svg polyline").first.wait_for()
    seen.look("export")
    for name in (
        "episodes",
        "step/20/train",
        "episode/20/train/3",
        "diff/20/train/0/20/train/1",
        "failures",
        "events",
        "metric/reward/mean",
    ):
        page.goto(f"{path.as_uri()}#/{name}")
        seen.view(name.split("/")[0])
        assert page.locator(".note.bad").count() == 0, name
    page.goto(f"{path.as_uri()}#/episodes")
    page.locator(".count", has_text="960 of 960").wait_for()
    page.goto(f"{path.as_uri()}#/episode/1/train/0")
    page.locator(
        ".note.bad", has_text="not in this exported file; it holds all curves, and the"
    ).wait_for()
    assert [url for url in asked if not url.startswith(path.as_uri())] == []
