"""Runs inside a sandbox, with its Python (3.8 or newer): calls a function of solution.py on every case of cases.json.

Never imported: grade.py sends its text. One JSON line a case on what was stdout: [number, "value", VALUE], or
[number, "error", TEXT]; a last line [-1, "error", TEXT] where the code does not even load. What the code prints goes to
stderr. It knows no expected values, so nothing here has to be kept from the code.
"""

import json
import os


def main():
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(number, kind, value):
        print(json.dumps([number, kind, value]), file=lines, flush=True)

    with open("cases.json") as file:
        asked = json.load(file)
    space = {"__name__": "solution"}
    try:
        with open("solution.py") as file:
            exec(compile(file.read(), "solution.py", "exec"), space)  # in a sandbox: what it is for
    except BaseException as error:
        report(-1, "error", said(error))
        return
    function = space.get(asked["function"])
    if not callable(function):
        report(-1, "error", f"there is no function {asked['function']}")
        return
    for number, arguments in enumerate(asked["cases"]):
        try:
            report(number, "value", function(*arguments))
        except BaseException as error:
            report(number, "error", said(error))


def said(error):
    return f"{type(error).__name__}: {error}"[:300]


main()
