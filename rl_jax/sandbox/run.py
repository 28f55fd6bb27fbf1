"""Sandbox: runs jobs in one backend's sandboxes, one at a time, to their end.

Owns: the outermost process of a sandbox, its streams and its deadlines.

Invariants
    run() returns when nothing of the sandbox is left: no process, mount or file. It waits END_S for that, then raises.
    The process starts with no environment, no descriptor and no terminal of this one's, in a session of its own inside.
    Output is read as it comes and kept up to its limit; what is beyond is counted and thrown away, and a program that
    prints FLOOD times as much is ended.
    A program is not ended for what the machine lacks: time that it was ready to run and no processor was free is not
    counted, up to Limits.wall_s once more.
    A program's failure is a Result. SandboxError says that it never ran, or that this machine failed it.
    A sandbox ends with the thread that runs it, however that ends: by PDEATHSIG, or before that is set because the
    launcher gets no answer. So run() must be called from a thread that stays.

Life
    1. the files go into one sealed, unnamed file, before what the program reads as stdin
    2. the backend's command is started; the launcher inside reports R once the files are in (else SandboxError), and
       waits until this process knows the sandbox's first process: its end, not that of the outermost, is the end of all
    3. streams are read; every LOOK_S the processes' memory and the number of files are looked at
    4. it ends by itself or is ended by a limit; the tar of its files was read meanwhile

Must not: interpret what the program says; run it any other way.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field

from rl_jax.sandbox import owner, watch
from rl_jax.sandbox.files import pack, sealed
from rl_jax.sandbox.records import Backend, Command, Ends, Job, Limits, Result, SandboxError

LOOK_S = 0.02
END_S = 5.0  # for a sandbox that was killed to be gone
FLOOD = 16  # times Limits.output_bytes
READ_SIZE = 1 << 16
ENTRY_BYTES = 2048  # of an archive, beside a file's content
RECORD = 10240  # an archive's size is a multiple


class Sandbox:
    """Blocking; each thread may run jobs of its own at the same time."""

    def __init__(self, backend: Backend):
        self.name = backend.name
        self._backend, self._lock, self._num = backend, threading.Lock(), 0

    def run(self, job: Job) -> Result:
        """Raises: SandboxError if the sandbox did not start, or did not end."""
        started_s = time.monotonic()
        with self._lock:
            self._num += 1
            num = self._num
        archive = _joined(job.snapshot, pack(job.files))
        report_read, report_write = (end.detach() for end in socket.socketpair())
        ends = Ends(
            report_write,
            len(archive),
            job.keeps_files,
            owner.new_tag(job.limits.wall_s, num),
            num,
        )
        try:
            command = self._backend.command(job, ends)
            try:
                live = _start(command, sealed(archive, job.stdin), report_read)
            finally:
                for descriptor in command.closes:
                    os.close(descriptor)
        except BaseException:
            os.close(report_read)
            raise
        finally:
            os.close(report_write)
        try:
            return _follow(live, job, started_s)
        finally:
            live.close()

    def reap(self) -> int:
        """End what processes that are gone left behind; how many sandboxes' processes, or containers."""
        return owner.reap() + self._backend.reap()


@dataclass
class _Stream:
    descriptor: int
    keep_bytes: int
    kept: bytearray = field(default_factory=bytearray)
    num_bytes: int = 0

    def read(self) -> bool:
        """Take what is there; False at the end."""
        try:
            data = os.read(self.descriptor, READ_SIZE)
        except ConnectionResetError:
            # Of the report: the other end went without reading its answer.
            return False
        self.num_bytes += len(data)
        self.kept += data[: max(0, self.keep_bytes - len(self.kept))]
        return bool(data)

    def drain(self) -> None:
        """Take what is there of a descriptor that does not block."""
        try:
            while self.read():
                pass
        except BlockingIOError:
            pass


@dataclass
class _Live:
    """A sandbox that was started."""

    process: subprocess.Popen
    exit_fd: int
    report_fd: int
    command: Command
    first_fd: int | None = None  # the process whose end is that of all

    def go(self) -> None:
        """The launcher reported: let it run the command."""
        self.first_fd = watch.open_first(self.process.pid)
        if not self.command.folder:
            try:
                os.write(self.report_fd, b"G")
            except OSError:
                pass  # it has just ended

    def wait(self) -> int:
        """The status of a sandbox that ended. Raises SandboxError if it is not gone within END_S."""
        status = self.process.wait(END_S)
        if self.first_fd is not None and not watch.is_gone(self.first_fd, END_S):
            raise SandboxError(f"a sandbox was not gone {END_S:g} s after its program ended")
        return status

    def end(self) -> None:
        """Kill it. Raises SandboxError if it is not gone within END_S."""
        is_gone = watch.end(self.process.pid, END_S)
        if self.command.cleanup:
            subprocess.run(self.command.cleanup, capture_output=True, timeout=30, check=False)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            is_gone = False
        if not is_gone:
            raise SandboxError(f"a sandbox was not gone {END_S:g} s after it was killed")

    def close(self) -> None:
        """Whatever happened, nothing is left of it."""
        try:
            if self.process.poll() is None:
                self.end()
        finally:
            for stream in (self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()
            for descriptor in (self.exit_fd, self.report_fd, self.first_fd):
                if descriptor is not None:
                    os.close(descriptor)
            if self.command.folder:
                shutil.rmtree(self.command.folder, ignore_errors=True)
            for folder in self.command.leaves:
                with contextlib.suppress(OSError):  # not made, or not empty: not the program's
                    os.rmdir(folder)


def _start(command: Command, stdin: int, report: int) -> _Live:
    if command.folder:
        os.close(report)
        report = os.open(f"{command.folder}/report", os.O_RDWR | os.O_NONBLOCK)
    try:
        process = subprocess.Popen(
            [word.encode("utf-8", "replace") for word in command.argv],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(command.environment),
            cwd="/",
            pass_fds=command.descriptors,
        )
    except OSError as error:
        raise SandboxError(f"sandbox: {command.argv[0]} cannot be started: {error}") from None
    finally:
        os.close(stdin)
    return _Live(process, os.pidfd_open(process.pid), report, command)


def _follow(live: _Live, job: Job, started_s: float) -> Result:
    limits, process = job.limits, live.process
    assert process.stdout and process.stderr, "Popen makes what PIPE asks for"
    out = _Stream(process.stdout.fileno(), limits.output_bytes)
    err = _Stream(process.stderr.fileno(), limits.output_bytes)
    most = limits.disk_bytes + ENTRY_BYTES * limits.files
    report = _Stream(live.report_fd, most + 1)
    limit = _until_end(live, limits, (out, err, report), started_s)
    if limit:
        live.end()
    status = live.wait()
    began = bytes(report.kept[:1])
    if began == b"F" and job.snapshot:
        limit = "disk"  # what an earlier program left, and the job's files, cannot be put together
    if began != b"R" and not limit:
        said = err.kept.decode("utf-8", "replace").strip().splitlines()
        raise SandboxError(
            f"sandbox did not start its program (exit {status}): {said[-1][:300] if said else 'it said nothing'}"
        )
    number = _signal_of(status)
    if not limit and number in (signal.SIGXCPU, signal.SIGXFSZ):
        limit = "cpu" if number == signal.SIGXCPU else "file"
    is_whole = job.keeps_files and not limit and len(report.kept) > RECORD
    return Result(
        status=None if limit or number else status,
        signal=number,
        limit=limit,
        stdout=bytes(out.kept),
        stderr=bytes(err.kept),
        dropped_bytes=sum(s.num_bytes - len(s.kept) for s in (out, err)),
        snapshot=bytes(report.kept[1:]) if is_whole else None,
        wall_s=time.monotonic() - started_s,
    )


def _until_end(live: _Live, limits: Limits, streams: tuple[_Stream, ...], started_s: float) -> str:
    """Read the streams until the sandbox ended; the limit that it passed, "" = none."""
    out, err, report = streams
    poll = select.poll()
    by_descriptor = {stream.descriptor: stream for stream in streams}
    for descriptor in (*by_descriptor, live.exit_fd):
        poll.register(descriptor, select.POLLIN)
    is_fifo = bool(live.command.folder)  # which has no end, as this process may write to it
    deadline_s = started_s + limits.wall_s
    next_look_s, has_ended = time.monotonic() + LOOK_S, False
    while by_descriptor or not has_ended:
        now_s = time.monotonic()
        if now_s >= deadline_s:
            waited_s = watch.waited_s(watch.descendants(live.process.pid))
            deadline_s = started_s + limits.wall_s + min(waited_s, limits.wall_s)
            if now_s >= deadline_s:
                return "wall"
        for descriptor, _ in poll.poll(1000 * max(0.0, min(deadline_s, next_look_s) - now_s)):
            if descriptor == live.exit_fd:
                has_ended = True
                poll.unregister(descriptor)
                if is_fifo:
                    poll.unregister(report.descriptor)
                    del by_descriptor[report.descriptor]
                    report.drain()
                continue
            stream = by_descriptor.get(descriptor)
            is_first = stream is report and not report.num_bytes
            if stream is not None and not stream.read():
                poll.unregister(descriptor)
                del by_descriptor[descriptor]
            elif is_first:
                live.go()
        if max(out.num_bytes, err.num_bytes) > FLOOD * limits.output_bytes:
            return "output"
        if report.num_bytes >= report.keep_bytes:
            return "disk"
        if not has_ended and time.monotonic() >= next_look_s:
            if limit := _passed(live.process.pid, limits):
                return limit
            next_look_s = time.monotonic() + LOOK_S
    return ""


def _passed(outer: int, limits: Limits) -> str:
    below = watch.descendants(outer)
    if watch.held_bytes(below) > limits.memory_bytes:
        return "memory"
    if below and watch.num_files(below[0], "/box") > limits.files:
        return "files"
    return ""


def _signal_of(status: int) -> int | None:
    """Backends and shells say 128 + n for a signal n; a negative status is of the outermost process itself."""
    number = -status if status < 0 else status - 128
    return number if 0 < number < signal.NSIG and number in signal.valid_signals() else None


def _joined(snapshot: bytes, archive: bytes) -> bytes:
    """One archive of both: the second follows the first's members, before its end mark."""
    if not snapshot or not archive:
        return snapshot or archive
    return _members(snapshot) + archive


def _members(snapshot: bytes) -> bytes:
    """An archive without its end mark, blocks of zeros."""
    end = len(snapshot) // 512 * 512
    while end and not any(snapshot[end - 512 : end]):
        end -= 512
    return snapshot[:end]
