"""Whatever happens inside a command becomes the right exit code, and nothing escapes `main`."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time

import pytest

from scrimp.cli import main
from scrimp.cli.show import error_text, show_error
from scrimp.errors import ConfigError, DataError, TrainingError

# A command body that takes long, and says whether it was unwound. The train command imports it.
SLOW = """
import sys, time, types
module = types.ModuleType("scrimp.training")
def train(*args, **kwargs):
    try:
        print("started", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
module.train = train
sys.modules["scrimp.training"] = module
from scrimp.cli import main
sys.exit(main(["train"]))
"""


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (DataError("file is empty", got="0 bytes", expected="text", do="choose another"), 2),
        (TrainingError("the loss is not finite"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit(None), 0),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), 2),
        (PermissionError(errno.EACCES, "Permission denied", "runs/a"), 2),
    ],
    ids=repr,
)
def test_expected_ends_show_no_traceback(calls, capsys, raised, code) -> None:
    calls.answers["train"] = raised
    assert main(["train"]) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "raised",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_memory_that_the_system_refuses_is_named_and_2(calls, capsys, raised) -> None:
    calls.answers["train"] = raised
    assert main(["train"]) == 2
    told = capsys.readouterr().err
    assert "the system gives no more memory" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    "raised", [ValueError("surprise"), OSError(errno.EIO, "Input/output error"), RuntimeError("surprise")]
)
def test_a_bug_shows_its_traceback_and_is_1(calls, capsys, raised) -> None:
    calls.answers["train"] = raised
    assert main(["train"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "bug in Scrimp" in shown


def test_storage_errors_name_the_path(calls, capsys) -> None:
    calls.answers["train"] = OSError(errno.ENOSPC, "No space left on device", "runs/a")
    main(["train"])
    assert "runs/a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
@pytest.mark.every(3)
def test_a_signal_unwinds_the_command(number, code) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job starts with SIGINT ignored, and hands that on.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "started\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "cleaned up\n")
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(calls, number) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    calls.answers["train"] = 0
    try:
        main(["train"])
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_forked_worker_ends_quietly_on_sigterm(calls) -> None:
    def fork_and_terminate(*_: object, **__: object):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        raise SystemExit(os.waitstatus_to_exitcode(status))

    sys.modules["scrimp.training"].train = fork_and_terminate
    assert main(["train"]) == 143


def test_the_signal_handler_is_put_back(calls) -> None:
    before = signal.getsignal(signal.SIGTERM)
    main(["train"])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"]])
def test_a_closed_pipe_is_no_traceback(words) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "scrimp", *words],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert process.returncode == 1
    assert process.stderr == b""


def test_a_closed_pipe_inside_a_command_is_1(calls, capfd) -> None:
    calls.answers["train"] = BrokenPipeError()
    saved = os.dup(1)
    try:
        assert main(["train"]) == 1
    finally:
        os.dup2(saved, 1)
        os.close(saved)


ERROR = ConfigError("optimizer.lr is wrong", got="a\x1b[31m\nb", expected=3, do="lower it")


def test_an_error_is_a_block_of_lines_without_control_characters() -> None:
    assert error_text(ERROR, color=False).split("\n") == [
        "error: optimizer.lr is wrong",
        "  got      a\\x1b[31m\\nb",
        "  expected 3",
        "  do       lower it",
    ]
    assert error_text(ConfigError("short"), color=False) == "error: short"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_color_only_on_a_terminal_that_wants_it(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal, file = Terminal(), io.StringIO()
    show_error(ERROR, terminal)
    show_error(ERROR, file)
    assert "\x1b[1;31merror:" in terminal.getvalue()
    assert "\x1b" not in file.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    show_error(ERROR, plain)
    assert plain.getvalue() == file.getvalue()


def test_a_message_that_the_terminal_cannot_write_is_shown_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show_error(ConfigError("café \udce9"), stream)
    assert stream.buffer.getvalue() == b"error: caf\\xe9 \\udce9\n"


# An object whose end is that of the interpreter, as a thread of C++ meets it.
LATE = """
import atexit, os, sys
class Late:
    def __del__(self, write=os.write):
        write(1, b"taken down\\n")
late = Late()
from scrimp.cli import entry
if {is_rank}:
    import scrimp.joining
dispatch = entry._dispatch
def with_handler(words):
    atexit.register(lambda: print("handler"))
    return dispatch(words)
entry._dispatch = with_handler
sys.argv = ["scrimp", *{words}]
sys.exit(entry.main())
"""


@pytest.mark.parametrize("is_rank", [True, False])
@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["no-such-command"], 2)])
def test_a_rank_ends_after_its_exit_handlers_and_before_python_is_taken_down(is_rank, words, code) -> None:
    """Threads of process groups that free tensors meanwhile would end it by SIGABRT."""
    program = LATE.format(is_rank=is_rank, words=words)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == code
    assert "handler\n" in found.stdout
    assert ("taken down" in found.stdout) is not is_rank
