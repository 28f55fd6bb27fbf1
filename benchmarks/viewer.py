"""The viewer on a run of 1,000 steps and 100,000 episodes: how long until something is to be seen.

    python -m benchmarks.viewer                  generates the run in a temporary directory
    python -m benchmarks.viewer --run DIR        a run that is there

The viewer is the program itself, in a process of its own; the browser is a headless Chromium (playwright), which is
running before anything is timed, as a person's is. Times are of one visit, the median of --visits, each with a fresh
viewer process. `opens_s` counts from the command line to the first view with its curves. Figures go to
benchmarks/results/viewer.json, behind those of earlier runs. Files are in the page cache, as they were just written.

Prediction, before the first run: the command's own start 0.6 s (numpy and tokenizers), the first view 0.4 s after it,
the histogram over all steps 1.5 s after its tab is clicked, an episode 0.1 s, 150 MB of memory.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import ran
from rl_jax.testing.generated_run import write_run

OUT = Path(__file__).parent / "results" / "viewer.json"
ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60.0  # for anything


def visit(browser: Any, run: Path) -> dict[str, float]:
    """One look at the run, from the command line on."""
    start = time.monotonic()
    command = [sys.executable, "-m", "rl_jax.tools.view", str(run), "--port=0"]
    viewer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert viewer.stdout is not None
        url = re.search(r"http://\S+", viewer.stdout.readline())
        assert url is not None, "the viewer did not start"
        took = {"command_s": time.monotonic() - start}
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(LIMIT_S * 1000)

        def timed(name: str, act, selector: str) -> None:
            begun = time.monotonic()
            act()
            page.locator(selector).first.wait_for()
            took[name] = time.monotonic() - begun

        timed("first_view_s", lambda: page.goto(url[0]), ".view[data-view=run][data-ready]")
        page.locator(".chart svg polyline").first.wait_for()
        took["opens_s"] = time.monotonic() - start
        took["opens_viewer_cpu_s"] = cpu_s(viewer.pid)
        tab = page.locator("#tabs a").nth(1)
        timed("first_episodes_s", tab.click, "tr.row")
        begun = time.monotonic()
        page.locator(
            ".count", has_text=re.compile("^[^·]*$")
        ).wait_for()  # nothing is being read any more
        took["histogram_of_all_s"] = took["first_episodes_s"] + time.monotonic() - begun
        num = int(re.sub(r"\D", "", page.text_content(".count").split(" of ")[0]))
        box = page.locator(".histogram svg").bounding_box()
        timed(
            "filter_by_histogram_s",
            lambda: page.mouse.click(box["x"] + box["width"] - 3, box["y"] + 30),
            ".view[data-view=episodes][data-ready] .bin:not(.in)",
        )
        timed(
            "sort_all_s",
            page.locator("th button", has_text="tokens").click,
            "th[aria-sort=descending]",
        )
        timed(
            "episode_s",
            lambda: page.keyboard.press("j") or page.keyboard.press("Enter"),
            ".turn .token",
        )
        timed("step_s", lambda: page.keyboard.press("u"), "article.group a.cell")
        timed("failures_s", page.locator("#tabs a").nth(2).click, "tr.kindrow")
        timed(
            "run_again_s", page.locator("#tabs a").nth(0).click, ".view[data-view=run][data-ready]"
        )
        took["episodes"] = num
        took["viewer_cpu_s"] = cpu_s(viewer.pid)
        took["viewer_mb"] = peak_mb(viewer.pid)
        page.close()
        return took
    finally:
        viewer.terminate()
        viewer.wait(10)


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1000


def cpu_s(pid: int) -> float:
    """Of the process so far: what it would take of a core that nobody else uses."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def program(run: Path, *words: str) -> float:
    """Seconds of the program in one of its other forms."""
    start = time.monotonic()
    command = [sys.executable, "-m", "rl_jax.tools.view", str(run), *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=10 * LIMIT_S)
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--visits", type=int, default=3)
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        run = args.run or write_run(Path(directory) / "run", args.steps, 10, 10)
        load = os.getloadavg()[0]
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        visits = []
        for _ in range(args.visits):
            visits.append({name: round(value, 3) for name, value in visit(browser, run).items()})
            print(json.dumps(visits[-1]), flush=True)
        browser.close()
        row = {name: round(statistics.median(v[name] for v in visits), 3) for name in visits[0]}
        row["text_s"] = round(program(run, "--text"), 3)
        row["text_failures_s"] = round(program(run, "--text", "--failures"), 3)
        exported = Path(directory) / "one.html"
        row["export_s"] = round(program(run, f"--export={exported}", "--export_mb=20"), 3)
        row["export_mb"] = round(exported.stat().st_size / 1e6, 2)
        row["run_mb"] = round(sum(f.stat().st_size for f in run.rglob("*") if f.is_file()) / 1e6)
        row["steps"] = len(list((run / "rollouts").iterdir()))
    runs = json.loads(OUT.read_text())["runs"] if OUT.exists() else []
    head = {
        **ran(("numpy",)),
        "command": shlex.join(["python", "-m", "benchmarks.viewer", *sys.argv[1:]]),
    }
    runs.append(
        {**head, "cpus": os.cpu_count(), "load_before": load, "visits": visits, "median": row}
    )
    OUT.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
