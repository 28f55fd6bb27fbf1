"""The viewer: a run directory, live or dead, as a local page, as text, or as one file.

Owns: reading what a run left (lines.py, run.py, samples.py, tokens.py, failures.py), the server on loopback (api.py,
server.py), the page (page/), the one-file export (export.py) and the text mode (text.py).
Invariants: it only reads: no lock, no cache on the disk, nothing of the run's processes is asked, so it works on a run
that lives, died or was copied. What cannot be read is told by file and place, and the rest is shown. Everything that a
model, an environment or a file said is data: bounded before it is sent, escaped by where it is shown (textContent in
the page, visible control characters in a terminal).
Life of a look:
1. run.py reads the rows, events and status that are new since the last look.
2. samples.py reads index.npz of the steps that are asked for, and one line of traces.jsonl where an episode is opened.
3. api.py answers; server.py, export.py and text.py show the same answers.
Must not: import jax, write into a run, or send anything anywhere.
"""
