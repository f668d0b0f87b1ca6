"""Python programs in processes of their own, started at a fifth of the usual cost.

A test of a command starts ``manage.py`` dozens of times, and nearly all the processor time of such
a process goes into importing Django and the library. Here a server of :mod:`multiprocessing` has
imported them once, and forks for each program. The child then becomes what ``python -m …`` starts:
its own working directory, environment, standard streams, warnings, ``sys.argv`` and ``sys.path``;
no settings are read before.

Not for tests of what a process imports, nor for programs that use :mod:`multiprocessing` themselves:
such a child would take the server for its own.

:data:`CONTEXT` is the same server for functions in processes of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import IO, TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tests.prepared_process import PreparedProcess

#: What it starts has no threads, no connections and no settings. There is one server in a process
#: and it has one list of imports, so no other module of tests may set the list.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


class PythonProcess:
    """A Python program in a process of its own, used like ``subprocess.Popen`` in text mode.

    :param arguments: what follows ``python`` on the command line: ``-W`` options, then ``-m`` and
        a module, ``-c`` and code, or a file.
    :param stdin: ``PIPE`` or ``DEVNULL``.
    :param stdout: ``PIPE``.
    :param stderr: ``PIPE``, ``STDOUT``, an open file or its descriptor, or None for that of the test.
    :param prepared: the process that forks for it; by default one in which only modules are imported.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdin: int = DEVNULL,
        stderr: int | IO[Any] | None = PIPE,
        prepared: PreparedProcess | None = None,
    ) -> None:
        program = Program(list(arguments), str(cwd), dict(env))
        with contextlib.ExitStack() as after_start:

            def opened(mode: str) -> tuple[int, IO[str]]:
                """Make a pipe; return the end of the child, and ours as a file."""
                ends = os.pipe()
                child_end, own_end = ends if mode == "w" else ends[::-1]
                after_start.callback(os.close, child_end)
                return child_end, open(own_end, mode)

            self.stdin: IO[str] | None = None
            self.stderr: IO[str] | None = None
            if stdin == PIPE:
                child_stdin, self.stdin = opened("w")
            else:
                child_stdin = os.open(os.devnull, os.O_RDONLY)
                after_start.callback(os.close, child_stdin)
            child_stdout, self.stdout = opened("r")
            if stderr == PIPE:
                child_stderr, self.stderr = opened("r")
            elif stderr == STDOUT:
                child_stderr = child_stdout
            elif stderr is None:
                child_stderr = 2
            else:
                child_stderr = stderr if isinstance(stderr, int) else stderr.fileno()
            streams = child_stdin, child_stdout, child_stderr
            self._process: Any
            if prepared is None:
                self._process = CONTEXT.Process(target=_InChild(program, streams))
                self._process.start()
            else:
                self._process = prepared.fork(program, streams)
        # Otherwise the end of the tests would wait for a process that a failed test has left.
        atexit.register(self.kill)

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the number of the signal that ended the process."""
        status: int | None = self._process.exitcode
        return status

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("python", timeout)
        atexit.unregister(self.kill)
        return self.returncode

    def communicate(self, input: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Send ``input``, wait for the end, and return what the process wrote to both streams."""
        with ThreadPoolExecutor(3) as executor:
            streams = [executor.submit(stream.read) for stream in self._outputs]
            if self.stdin is not None and not self.stdin.closed:
                executor.submit(self._send, input)
            try:
                self.wait(timeout)
            except BaseException:
                self.kill()
                raise
            texts = [stream.result() for stream in streams]
        for stream in self._outputs:
            stream.close()
        return texts[0], texts[1] if len(texts) > 1 else ""

    @property
    def _outputs(self) -> list[IO[str]]:
        return [self.stdout, *([self.stderr] if self.stderr is not None else [])]

    def _send(self, text: str) -> None:
        assert self.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.stdin:
            self.stdin.write(text)

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for stream in self._outputs:
            stream.close()
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
        self.wait()


def run_python(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    input: str = "",
    stderr: int | IO[Any] = PIPE,
    timeout: float,
    new_interpreter: bool = False,
    prepared: PreparedProcess | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, like ``subprocess.run``.

    :param new_interpreter: whether it runs in an interpreter of its own, not in a forked one.
    :param prepared: as for :class:`PythonProcess`.
    """
    if new_interpreter:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env=env,
            input=input,
            stdout=PIPE,
            stderr=stderr,
            text=True,
            timeout=timeout,
        )
    process = PythonProcess(
        arguments,
        cwd=cwd,
        env=env,
        stdin=PIPE if input else DEVNULL,
        stderr=stderr,
        prepared=prepared,
    )
    out, err = process.communicate(input, timeout)
    return subprocess.CompletedProcess(arguments, process.wait(), out, err)


class _InChild:
    """What a child of the server of :mod:`multiprocessing` does."""

    def __init__(self, program: Program, streams: Sequence[int]) -> None:
        self.program = program
        self.streams = streams

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "streams": [DupFd(stream) for stream in self.streams]}

    def __call__(self) -> None:
        sys.exit(self.program.run([stream.detach() for stream in self.streams]))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Program:
    """What a forked child runs in place of a new interpreter."""

    arguments: list[str]
    cwd: str
    env: dict[str, str]

    def run(self, streams: Sequence[int]) -> int:
        """Run the program and the end of the interpreter; return the exit status.

        :param streams: the descriptors of its standard input, output and error.
        """
        self._set_streams(streams)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        tempfile.tempdir = None
        self._register_end_of_library()
        sys.dont_write_bytecode = bool(self.env.get("PYTHONDONTWRITEBYTECODE"))
        arguments = self._take_warnings(self.arguments)
        return _status_of(lambda: self._run(arguments))

    @staticmethod
    def _register_end_of_library() -> None:
        """Python 3.13 forgets in a child what a module registered when it was loaded."""
        from sharded_orm import runtime

        atexit.unregister(runtime._stop)
        atexit.register(runtime._stop)

    @staticmethod
    def _set_streams(descriptors: Sequence[int]) -> None:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)

    def _take_warnings(self, arguments: list[str]) -> list[str]:
        options = [option for option in self.env.get("PYTHONWARNINGS", "").split(",") if option]
        while arguments[0] == "-W":
            options.append(arguments[1])
            arguments = arguments[2:]
        sys.warnoptions = options
        warnings._processoptions(options)  # type: ignore[attr-defined]  # as at the interpreter's start
        return arguments

    def _run(self, arguments: list[str]) -> None:
        first, *others = arguments
        folder = str(Path(first).parent) if not first.startswith("-") else self.cwd
        own_path = [folder, *filter(None, self.env.get("PYTHONPATH", "").split(os.pathsep))]
        sys.path[:] = [*own_path, *(entry for entry in sys.path if entry not in own_path)]
        if first == "-m":
            sys.argv = others
            if not hasattr(sys.modules.get(others[0]), "__path__"):
                sys.modules.pop(others[0], None)  # A prepared process has imported it.
            runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c", *others[1:]]
            exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            runpy.run_path(first, run_name="__main__")


def _status_of(program: Any) -> int:
    """Run ``program`` and the end of the interpreter; return the exit status."""
    status = 0
    try:
        program()
    except SystemExit as exc:
        if isinstance(exc.code, int):
            status = exc.code
        elif exc.code is not None:
            print(exc.code, file=sys.stderr)
            status = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    # A process of multiprocessing ends without them.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status
