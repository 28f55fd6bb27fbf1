"""BACKENDS: what can isolate a program that a model wrote, by name. Importing it imports none of them.

    from rl_jax.sandbox.load import open_sandbox
    from rl_jax.sandbox.records import Job, Limits

    sandbox = open_sandbox("bubblewrap")  # raises SandboxMissing, one line with the remedy, where it cannot isolate
    result = sandbox.run(Job(("python3", "main.py"), files={"main.py": b"print(2 + 3)"}))
    result.stdout, result.status, result.limit  # b"5\n", 0, ""

A backend builds a command line (records.py: Backend); starting it, feeding it, its deadlines and its end are the same
for all (run.py). A name with a colon is a backend and what it runs: "container:docker.io/library/python:3.12-slim".

What a program cannot do in a sandbox: see files of the host beside a read-only /usr, reach a network (it has a loopback
of its own), see environment variables, descriptors or processes of others, gain a privilege, or leave anything behind.
What it may use is bounded (records.Limits). What comes back (output, status, files) is the program's word and no more.

Must not: fall back to less isolation than was asked for.
"""

# name -> "module:attribute", a class made with what stands behind the name's colon
BACKENDS: dict[str, str] = {
    "bubblewrap": "rl_jax.sandbox.bubblewrap:Bubblewrap",
    "nsjail": "rl_jax.sandbox.nsjail:Nsjail",
    "container": "rl_jax.sandbox.container:Container",
}
