"""Tasks of kfp's local runner as forks of one process that has loaded what stages need.

The runner starts a Python for each task, which loads torch and transformers anew: seconds, where
the work on a small model takes tenths. Here one process loads them once for a whole run. It has a
single thread, so what is forked from it starts like a new process, with the environment and the
output of its task. Where there is an accelerator tasks stay new processes: a driver that a package
has opened while it was loaded would not survive the fork, and models are large there.

`with warm_tasks():` does it. `python -m pipelines.warm` is the process; nobody starts it by hand.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from planish.run.__main__ import STAGES
from planish.run.signals import on_signal

LOADED = (
    "kfp.dsl.executor_main",
    "pyarrow.compute",
    "pyarrow.parquet",
    "torch.distributed.fsdp",
    "planish.engines.measure",
    "planish.engines.transformers.engine",
    "planish.stages.sft.probe",
    "planish.stages.sft.training",
    "planish.stages.train.ranks.worker",
    *STAGES.values(),
)
"""What stages import; what is not installed here is left out."""
RUNTIME = {"_KFP_RUNTIME": "true"}
"""Tells kfp, before its first import, that it runs a task and compiles nothing."""
DEVICES = Path("/dev")
ACCELERATORS = ("nvidia[0-9]*", "kfd")
"""Files of the drivers of NVIDIA and AMD."""
WORD_BYTES = 8
END_SECONDS = 10.0


@dataclass(frozen=True)
class Task:
    """What a lightweight component of kfp is, as its command line tells."""

    source: str
    """Code of the component."""
    arguments: Sequence[str]
    """Of kfp's executor: the input, and the function to call."""
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        """Name of the function that is called."""
        return self.arguments[-1]


def task_of(command: Sequence[str], environment: Mapping[str, str]) -> Task | None:
    """Return the task of a command line of kfp's local runner; None for one of another form."""
    places = [n for n, word in enumerate(command) if "kfp.dsl.executor_main" in word]
    if len(places) != 1 or "/ephemeral_component.py" not in command[places[0]]:
        return None
    source, *arguments = command[places[0] + 1 :]
    if arguments[-2:-1] != ["--function_to_execute"]:
        return None
    return Task(source, arguments, {**environment, **RUNTIME})


@contextlib.contextmanager
def warm_tasks() -> Iterator[None]:
    """Let kfp's local runner start its tasks from one warm process while the block runs.

    Without Linux's descriptors of processes, and beside an accelerator, nothing changes.
    """
    from kfp.local import subprocess_task_handler

    has_accelerator = any(True for pattern in ACCELERATORS for _ in DEVICES.glob(pattern))
    if has_accelerator or not hasattr(os, "pidfd_open"):
        yield
        return
    plain = subprocess_task_handler.run_local_subprocess
    starter = Starter()

    def run(full_command: list[str], env_vars: Mapping[str, str] | None = None) -> int:
        task = task_of(full_command, {**os.environ, **(env_vars or {})})
        return starter.run(task) if task else int(plain(full_command, env_vars))

    subprocess_task_handler.run_local_subprocess = run
    try:
        yield
    finally:
        subprocess_task_handler.run_local_subprocess = plain
        starter.close()


class Starter:
    """The warm process, seen from the program that runs a pipeline: any thread may run a task."""

    def __init__(self) -> None:
        """Start it; it loads while the pipeline is prepared."""
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.warm", str(theirs.fileno())],
                env={**os.environ, **RUNTIME},
                pass_fds=[theirs.fileno()],
            )

    def run(self, task: Task) -> int:
        """Run a task to its end, print what it prints, and return its exit code.

        Where the process has ended, as after a signal, a new one runs the next task.
        """
        reader, writer = os.pipe()
        answer, theirs = socket.socketpair()
        with answer, open(reader, errors="replace") as output:
            try:
                self._send(task, [writer, theirs.fileno()])
            except OSError:
                return 1
            finally:
                os.close(writer)
                theirs.close()
            for line in output:
                sys.stdout.write(line)
                sys.stdout.flush()
            code = _receive(answer, WORD_BYTES)
        return int.from_bytes(code, "little", signed=True) if code else 1

    def _send(self, task: Task, descriptors: Sequence[int]) -> None:
        data = json.dumps(asdict(task)).encode()
        with self._lock:
            if self._process.poll() is not None:
                self.close()
                self._start()
            head = len(data).to_bytes(WORD_BYTES, "little")
            socket.send_fds(self._channel, [head], descriptors)
            self._channel.sendall(data)

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _receive(channel: socket.socket, size: int) -> bytes:
    """Return so many bytes; none when the other side has ended."""
    data = b""
    while len(data) < size:
        try:
            part = channel.recv(size - len(data))
        except OSError:
            return b""
        if not part:
            return b""
        data += part
    return data


class Forks:
    """The warm process itself: forks a child for each task, and tells how it ended."""

    def __init__(self, channel: socket.socket) -> None:
        """Serve the program at the other end."""
        self._channel = channel
        self._ends = False
        self._children: dict[int, tuple[int, socket.socket]] = {}
        """Descriptor of the process -> its id, and where its exit code goes."""

    def stop(self, number: int) -> None:
        """End at a signal, but not before the tasks, which have been told to end too."""
        self._ends = True
        if not self._children:
            raise SystemExit(128 + number)

    def serve(self) -> Task | None:
        """Return a task in each child; None in the warm process, when nobody needs it any more."""
        while self._children or not self._ends:
            listened = [*self._children, *([] if self._ends else [self._channel.fileno()])]
            for ready in select.select(listened, [], [])[0]:
                if ready in self._children:
                    self._tell(ready)
                elif task := self._fork():
                    return task
        return None

    def _fork(self) -> Task | None:
        """Return the task that has come, in the child that is to run it."""
        head, descriptors, _, _ = socket.recv_fds(self._channel, WORD_BYTES, 2)
        data = head and _receive(self._channel, int.from_bytes(head, "little"))
        if not data:
            self._ends = True
            return None
        output, answer = descriptors
        child = os.fork()
        if child:
            os.close(output)
            self._children[os.pidfd_open(child)] = (child, socket.socket(fileno=answer))
            return None
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.close(answer)
        self._channel.close()
        for descriptor, (_, other) in self._children.items():
            os.close(descriptor)
            other.close()
        self._children.clear()
        return Task(**json.loads(data))

    def _tell(self, descriptor: int) -> None:
        """Send the exit code of a child that has ended."""
        child, answer = self._children.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        with answer, contextlib.suppress(OSError):
            answer.sendall(code.to_bytes(WORD_BYTES, "little", signed=True))


def load() -> None:
    """Import what stages need, and let garbage collection leave it alone."""
    from planish.models.library import load_transformers

    gc.disable()
    with contextlib.suppress(ImportError):
        load_transformers()
    for name in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()
    gc.freeze()


def become(task: Task) -> None:
    """Run a task in this process, as kfp's own command line would."""
    from kfp.dsl import executor_main

    os.environ.clear()
    os.environ.update(task.environment)
    with contextlib.suppress(OSError):
        # The name that `ps` and `top` show.
        Path("/proc/self/comm").write_text(task.name, "utf-8")
    with tempfile.TemporaryDirectory(prefix="planish-task-") as folder:
        path = Path(folder) / "ephemeral_component.py"
        path.write_text(task.source, "utf-8")
        sys.argv = [executor_main.__file__, "--component_module_path", str(path), *task.arguments]
        executor_main.executor_main()


def run_to_the_end(work: Callable[[], object]) -> NoReturn:
    """Do the work, and end this process with what an end has to do, but for freeing what is loaded.

    To free it object by object takes longer than the work of many a task.
    """
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    # What Python does when it ends, in its order: first threads that are not daemons.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def main(arguments: Sequence[str]) -> int:
    """Serve at the socket whose descriptor is the one argument."""
    with socket.socket(fileno=int(arguments[0])) as channel:
        forks = Forks(channel)
        with on_signal(forks.stop):
            load()
            task = forks.serve()
    if task:
        run_to_the_end(lambda: become(task))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
