"""Tasks of the local runner start from one process, and are like processes of their own."""

import builtins
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from kfp import dsl
from kfp.local import subprocess_task_handler

from pipelines import warm
from pipelines.local import run_here
from planish.store.processes import process_start
from tests.integration.waiting import wait_for

OPTIONS = {"base_image": "python:3.11", "packages_to_install": [], "install_kfp_package": False}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@dsl.component(**OPTIONS)
def tell(folder: str, name: str):
    """Write down what this process is."""
    import json
    import os
    import pathlib
    import signal
    import sys
    import threading

    import planish.run.lock

    facts = {
        "torch": "torch" in sys.modules,
        "parent": os.getppid(),
        "holder": planish.run.lock.current_holder().pid,
        "name": pathlib.Path("/proc/self/comm").read_text().strip(),
        "seen": os.environ.get("SEEN_BY_TASKS", ""),
        "left": hasattr(json, "left"),
        "threads": threading.active_count(),
        "signals": [repr(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "folder": os.path.dirname(sys.argv[2]),
    }
    pathlib.Path(folder, name).write_text(json.dumps(facts))
    print("printed by", name)
    os.environ["SEEN_BY_TASKS"] = json.left = "by another task"


@dsl.component(**OPTIONS)
def end(code: int):
    """End with an exit code, or by a signal."""
    import os

    if code < 0:
        os.kill(os.getpid(), -code)
    raise SystemExit(code)


@dsl.component(**OPTIONS)
def leave(folder: str):
    """End with a thread at work, a pool that is open, and something to do at the end."""
    import atexit
    import concurrent.futures
    import pathlib
    import sys
    import threading
    import time

    def write(name: str, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        pathlib.Path(folder, name).touch()

    atexit.register(write, "at exit")
    threading.Thread(target=write, args=("thread", 0.5)).start()
    concurrent.futures.ThreadPoolExecutor(1).submit(write, "pool", 0.5)
    sys.exit("told at the end")


@dsl.component(**OPTIONS)
def meet(folder: str, name: str):
    """Wait until another task is at work too."""
    import pathlib
    import time

    pathlib.Path(folder, f"here-{name}").touch()
    deadline = time.monotonic() + 120
    while len(list(pathlib.Path(folder).glob("here-*"))) < 2:
        assert time.monotonic() < deadline, f"{name} is alone"
        time.sleep(0.01)


@dsl.pipeline
def tasks_apart_and_at_once(folder: str):
    """Two tasks, one after the other, and two at once."""
    first = tell(folder=folder, name="first")
    second = tell(folder=folder, name="second").after(first)
    with dsl.ParallelFor(["left", "right"]) as name:
        meet(folder=folder, name=name).after(second)


@dsl.component(**OPTIONS)
def overlap(folder: str, name: str):
    """Begin while the task before is at work, and end after it."""
    import os
    import pathlib
    import time

    here = pathlib.Path(folder)
    try:
        (here / "first").symlink_to(str(os.getpid()))
        awaited, there = here / "second", True
    except FileExistsError:
        (here / "second").touch()
        awaited, there = pathlib.Path("/proc", os.readlink(here / "first")), False
    deadline = time.monotonic() + 120
    while awaited.exists() != there:
        assert time.monotonic() < deadline, f"{name} is alone"
        time.sleep(0.01)


@dsl.pipeline
def tasks_that_overlap(folder: str):
    """Of two tasks the first to begin is the first to end."""
    with dsl.ParallelFor(["left", "right"]) as name:
        overlap(folder=folder, name=name)


@dsl.pipeline
def failing(code: int):
    """One task that fails."""
    end(code=code)


def test_tasks_find_all_loaded_and_nothing_of_each_other(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SEEN_BY_TASKS", "of the runner")
    plain = subprocess_task_handler.run_local_subprocess
    run_here(tasks_apart_and_at_once, {"folder": str(tmp_path)})
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("first", "second"))
    assert first["parent"] == second["parent"] != os.getpid()
    for one in (first, second):
        assert one["torch"]
        assert one["name"] == "tell"
        assert one["seen"] == "of the runner"
        assert not one["left"]
        assert one["threads"] == 1
        # What a new Python has.
        assert one["signals"] == [repr(signal.SIG_DFL), repr(signal.default_int_handler)]
        assert not Path(one["folder"]).exists()
        # The lock of a root is held for the runner, as it is with tasks that are new processes.
        assert one["holder"] == os.getpid()
    assert first["descriptors"] == second["descriptors"]
    printed = capfd.readouterr().out
    assert "printed by first" in printed
    assert "printed by second" in printed
    # The process ends with the run, and kfp is as it was.
    assert process_start(first["parent"]) == 0
    assert subprocess_task_handler.run_local_subprocess is plain


@pytest.fixture(scope="module")
def starter():
    """A warm process that tests share; what one has ended is started again by the next."""
    starter = warm.Starter()
    yield starter
    starter.close()


@pytest.fixture
def one_starter(starter, monkeypatch):
    """Runs take their tasks from the process that tests share."""
    shared = SimpleNamespace(run=starter.run, close=lambda: None)
    monkeypatch.setattr(warm, "Starter", lambda: shared)


@pytest.mark.usefixtures("one_starter")
def test_the_program_keeps_its_print_and_its_loggers(tmp_path, capsys):
    """kfp gives back what it found at the start of a task, in the order in which tasks end."""
    root, plain = logging.getLogger(), builtins.print
    before = root.level, root.handlers[:]
    run_here(tasks_that_overlap, {"folder": str(tmp_path)})
    assert builtins.print is plain
    assert (root.level, root.handlers) == before
    capsys.readouterr()
    print("at the margin")
    assert capsys.readouterr().out == "at the margin\n"


def test_beside_an_accelerator_tasks_stay_new_processes(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(warm, "DEVICES", tmp_path)
    plain = subprocess_task_handler.run_local_subprocess
    with warm.warm_tasks():
        assert subprocess_task_handler.run_local_subprocess is plain


@pytest.mark.usefixtures("one_starter")
@pytest.mark.parametrize("code", [3, -9])
def test_a_task_that_fails_fails_the_run(code):
    with pytest.raises(RuntimeError, match="end"):
        run_here(failing, {"code": code})


def task(component, **arguments):
    """Return a task as the runner's command line has it."""
    command = component.component_spec.implementation.container.command
    given = json.dumps(
        {"inputs": {"parameterValues": arguments}, "outputs": {"outputFile": "/dev/null"}}
    )
    words = [*command, "--executor_input", given, "--function_to_execute", component.name]
    found = warm.task_of(words, os.environ)
    assert found is not None
    return found


def test_a_task_ends_as_a_python_does(starter, tmp_path, capfd):
    assert starter.run(task(leave, folder=str(tmp_path))) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"at exit", "thread", "pool"}
    assert starter.run(task(meet, folder=str(tmp_path / "nowhere"), name="x")) == 1
    printed = capfd.readouterr().out
    assert "told at the end\n" in printed
    assert "FileNotFoundError" in printed


def test_exit_codes_are_those_of_the_tasks_and_a_lost_process_is_replaced(starter, tmp_path):
    assert starter.run(task(end, code=7)) == 7
    assert starter.run(task(end, code=-15)) == -15
    lost = starter._process
    assert lost.poll() is None
    lost.kill()
    lost.wait()
    assert starter.run(task(tell, folder=str(tmp_path), name="after")) == 0
    assert json.loads((tmp_path / "after").read_text())["parent"] == starter._process.pid


def has_handled(pid, number):
    """Tell whether a signal is no longer pending, and the process waits for the next event."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    pending = int(status["ShdPnd"], 16) | int(status["SigPnd"], 16)
    return not pending >> (number - 1) & 1 and status["State"].startswith("S")


def test_a_task_outlives_the_signal_that_its_own_process_has_not_got(starter, tmp_path):
    codes = []
    run = task(meet, folder=str(tmp_path), name="left")
    thread = threading.Thread(target=lambda: codes.append(starter.run(run)))
    thread.start()
    wait_for(lambda: (tmp_path / "here-left").exists(), 120.0)
    starter._process.terminate()
    wait_for(lambda: has_handled(starter._process.pid, signal.SIGTERM), 120.0)
    assert starter._process.poll() is None
    (tmp_path / "here-right").touch()
    thread.join()
    assert codes == [0]
    assert starter._process.wait(120) == 0


def test_commands_of_other_forms_are_left_to_kfp():
    whole = task(end, code=0)
    assert whole.name == "end"
    for command in (
        ["sh", "-c", "python3 -m kfp.dsl.executor_main --function_to_execute end"],
        ["python3", "main.py"],
        [],
    ):
        assert warm.task_of(command, {}) is None


def test_the_process_that_loads_imports_nothing_heavy_when_ranks_import_it_again():
    """What is spawned by a task imports the module of the main program."""
    code = "import sys, pipelines.warm; print('torch' in sys.modules or 'kfp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
