"""A run as one HTML file that needs no server and no network: the page, its script and style inside, and data beside.

Invariants: the data is JSON in an element that is not run, with <, > and & as escapes, so nothing in it ends that
element; the file's own policy names the script and the style by their hashes and forbids everything else; it grows to
at most the bytes that were asked for: curves, lists and failures are always in it, whole episodes from the newest step
back as far as there is room, and it says which.
Must not: hold a path of the page's server, or write into the run.
"""

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

from rl_jax.disk import naming
from rl_jax.viewer.api import Api, Refusal, to_json
from rl_jax.viewer.samples import SPLITS, SampleError
from rl_jax.viewer.server import HTML, PAGE, SCRIPTS, STYLE

POINTS = 400  # of a curve
MIN_BYTES = 1_000_000
MAX_STEPS = 200  # of whose tool calls it holds the counts


def write(api: Api, path: Path, max_bytes: int) -> tuple[int, str]:
    """(bytes written, what is left out or ""). Raises ValueError: too few allowed for what is always there; OSError."""
    if max_bytes < MIN_BYTES:
        raise ValueError(
            f"--export_mb={max_bytes / 1e6:g} is below {MIN_BYTES / 1e6:g}, which curves and lists take"
        )
    data, left_out = collect(api, max_bytes)
    html = page(to_json(data))
    temporary = path.with_name(path.name + ".tmp")
    with naming(path):
        temporary.write_bytes(html)
        os.replace(temporary, path)
    return len(html), left_out


def page(data: bytes) -> bytes:
    """data: ASCII JSON."""
    html = (PAGE / HTML).read_text(encoding="utf-8")
    style = (PAGE / STYLE).read_text(encoding="utf-8")
    script = "\n".join(
        (PAGE / name).read_text(encoding="utf-8").replace('"use strict";\n', "") for name in SCRIPTS
    )
    script = f'"use strict";\n{script}'
    assert "</script" not in script and "</style" not in style, (
        "the page's own files must not end their element"
    )
    head, body = html.split("</head>")
    kept = [
        line for line in head.splitlines() if "<script" not in line and "stylesheet" not in line
    ]
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    kept.insert(4, f'<meta http-equiv="Content-Security-Policy" content="{policy}">')
    return b"".join(
        [
            "\n".join(kept).encode(), b"\n<style>", style.encode(), b"</style>\n</head>",
            body.replace("</body>", "").replace("</html>", "").encode(),
            b'<script type="application/json" id="export">', _escaped(data), b"</script>\n<script>", script.encode(),
            b"</script>\n</body>\n</html>\n",
        ]
    )  # fmt: skip


def collect(api: Api, max_bytes: int) -> tuple[dict[str, Any], str]:
    """What the page's questions are answered from, and what is left out. Raises ValueError as write()."""
    metrics = api.answer("metrics", {})
    failures = api.answer("failures", {})
    names = [series["name"] for family in metrics for series in family["series"]]
    curves = api.run.curves(names, POINTS)
    data: dict[str, Any] = {
        "run": api.answer("run", {}), "metrics": metrics, "failures": failures, "events": api.answer("events", {}),
        "curves": curves, "columns": {}, "names": {}, "episodes": {}, "tools": {}, "holds": "",
        "examples": {
            f"{kind['state']}\n{kind['reason']}": api.answer("examples", kind)
            for kind in failures["kinds"][:100]
        },
    }  # fmt: skip
    beyond = False
    for split in SPLITS:
        piece = api.answer("columns", {"split": split})
        beyond |= piece["next"] is not None
        data["columns"][split] = {**piece, "next": None}
    room = max_bytes - len(page(to_json(data)))
    if room < 0:
        needed = (max_bytes - room) / 1e6
        raise ValueError(
            f"--export_mb={max_bytes / 1e6:g} is too small: curves, lists and failures alone take {needed:.1f} MB"
        )
    steps = sorted(api.samples.steps(), reverse=True)
    oldest, num = _fill(api, data, steps, room)
    first = f"steps {oldest} to {steps[0]}" if steps and num else "no step"
    data["holds"] = f"all curves, and the {num} episodes of {first}"
    left = []
    if steps and (not num or oldest > steps[-1]):
        left.append(f"episodes of steps before {oldest}" if num else "all episodes")
    if beyond:
        left.append("the oldest steps of the list of episodes")
    return data, " and ".join(left)


def _fill(api: Api, data: dict[str, Any], steps: list[int], room: int) -> tuple[int, int]:
    """Whole steps, newest first, until one does not fit: (the oldest that is in, episodes)."""
    oldest = num = 0
    for count, step in enumerate(steps):
        episodes, names, tools = {}, {}, {}
        for split in SPLITS:
            index = api.samples.try_index(step, split)
            for i in range(index.num if index else 0):
                who = {"step": str(step), "split": split, "i": str(i)}
                try:
                    episodes[f"{step}/{split}/{i}"] = api.answer("episode", who)
                    names[f"{split}.{step}.{i}"] = api.answer(
                        "names", {"split": split, "who": f"{step}.{i}"}
                    )[0]
                except (Refusal, SampleError):
                    continue  # the page says of it that it is not in the file
            if index and count < MAX_STEPS:
                tools[f"{step}/{split}"] = api.answer("tools", {"step": str(step), "split": split})
        room -= sum(len(_escaped(to_json(part))) for part in (episodes, names, tools))
        if room < 0:
            break
        data["episodes"].update(episodes)
        data["names"].update(names)
        data["tools"].update(tools)
        oldest, num = step, num + len(episodes)
    return oldest, num


def _escaped(data: bytes) -> bytes:
    """JSON in which nothing ends the element that holds it."""
    for sign, escape in ((b"<", b"\\u003c"), (b">", b"\\u003e"), (b"&", b"\\u0026")):
        data = data.replace(sign, escape)
    return data


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
