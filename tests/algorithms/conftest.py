"""The file of worked cases: --cases FILE, by default the one in data/."""

import json
from pathlib import Path


def load_cases(config):
    path = config.getoption("cases", None) or Path(__file__).parent / "data" / "cases.json"
    return json.loads(Path(path).read_text(encoding="utf-8"))
