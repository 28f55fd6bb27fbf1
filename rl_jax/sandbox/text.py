"""What a program printed, as text that a policy and a person can read: whatever bytes it was."""

import re

# Colours and cursor moves, window titles, other escapes; then every control character but tab and line end.
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def readable(data: bytes, max_chars: int) -> str:
    """UTF-8 with U+FFFD for what is none, without escape sequences and control characters; beyond max_chars, the
    beginning and the end with a line between them that says how much is missing."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    text = _CONTROL.sub("\ufffd", _ESCAPE.sub("", text))
    if len(text) <= max_chars:
        return text
    head, tail = text[: max_chars // 2], text[len(text) - max_chars // 2 :]
    return f"{head}\n... {len(text) - len(head) - len(tail)} characters left out ...\n{tail}"
