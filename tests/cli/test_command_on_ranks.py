"""Ranks that meet by their environment and do not fit together: one clear error, exit code 2, every process ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
from ranks import SOURCE, by_environment, ended, environment, free_port, start, start_ranks, wait_for
from tiny_run import flags, write_corpus

from scrimp.joining import first_failure
from scrimp.meeting import ANSWER_S
from scrimp.world import is_lost_connection

GLOO = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9366."
)


def errors_of(found: list[tuple[int, str]]) -> list[str]:
    """The lines that report an error, of all ranks."""
    return [line for _, output in found for line in output.splitlines() if line.startswith("error:")]


@pytest.mark.slow
def test_settings_that_differ_are_told_once(tmp_path: Path) -> None:
    """The sample of `make test`: two processes meet, compare their papers, and end before there is a process group."""
    port, ranks = free_port(), []
    for rank in range(2):
        folder = tmp_path / f"node{rank}"
        folder.mkdir()
        (folder / "my.toml").write_text(f"[train]\nsteps = {rank + 1}\n")
        environ = environment(tmp_path, **by_environment(rank, 2, port))
        script = f"import os, sys; os.chdir({str(folder)!r}); from scrimp.cli import main; sys.exit(main())"
        ranks.append(start(["-c", script, "train", "my.toml"], environ))
    found = ended(ranks)
    assert [code for code, _ in found] == [2, 2], found
    assert errors_of(found) == ["error: ranks differ in the settings file"]
    assert " on rank 0; " in found[0][1]
    assert found[1][1] == ""


@pytest.mark.slow
def test_another_version_of_the_source_is_told(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(SOURCE / "scrimp", other / "scrimp", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "scrimp" / "world.py").open("a") as file:
        file.write("# another version\n")
    port = free_port()
    found = ended(
        [
            start(
                ["-m", "scrimp", "train"],
                environment(tmp_path, source=other if rank == 1 else SOURCE, **by_environment(rank, 3, port)),
            )
            for rank in range(3)
        ]
    )
    assert [code for code, _ in found] == [2, 2, 2]
    assert errors_of(found) == ["error: ranks differ in Scrimp's source"]
    assert "on ranks 0 and 2; " in found[0][1]


@pytest.mark.slow
def test_a_mistake_on_one_rank_alone_is_told_with_its_rank(tmp_path: Path) -> None:
    port = free_port()
    found = ended(
        [
            start(
                ["-m", "scrimp", "train", *(["--train.steps=x"] if rank else [])],
                environment(tmp_path, **by_environment(rank, 2, port)),
            )
            for rank in range(2)
        ]
    )
    assert [code for code, _ in found] == [2, 2]
    assert errors_of(found) == ["error: rank 1: --train.steps cannot take this value"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["SCRIMP_JOIN_TIMEOUT", "SCRIMP_HANG_TIMEOUT", "SCRIMP_COLLECTIVE_TIMEOUT", "SCRIMP_GRACE"]
)
def test_a_limit_that_is_wrong_on_one_rank_is_told_with_its_rank(tmp_path: Path, name: str) -> None:
    """And holds nobody up."""
    port, common = free_port(), {"SCRIMP_JOIN_TIMEOUT": "1000"}
    common["TORCHELASTIC_RUN_ID"] = "x"  # ranks of torchrun ask for the grace
    found = ended(
        [
            start(
                ["-m", "scrimp", "train"],
                environment(
                    tmp_path, **by_environment(rank, 2, port) | common | ({name: "soon"} if rank else {})
                ),
            )
            for rank in range(2)
        ]
    )
    assert [code for code, _ in found] == [2, 2], found
    assert errors_of(found) == [f"error: rank 1: the environment's {name} is wrong"]


@pytest.mark.slow
def test_a_launchers_port_may_be_silent_until_rank_0_is_there(tmp_path: Path) -> None:
    """`scrimp launch` opens it; on a busy machine rank 0 takes long to load torch."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as port:
        number = port.getsockname()[1]
        common = {"SCRIMP_LAUNCH": f"{os.getpid()}.x", "MASTER_ADDR": "127.0.0.1"}
        words = ["-m", "scrimp", *flags(write_corpus(tmp_path), tmp_path / "run", "--train.steps=2")]
        second = start(words, environment(tmp_path, **by_environment(1, 2, number) | common))
        time.sleep(ANSWER_S + 8)
        own = {"SCRIMP_LISTENER": str(port.fileno())}
        first = start(
            words, environment(tmp_path, **by_environment(0, 2, number) | common | own), [port.fileno()]
        )
    found = ended([first, second])
    assert [code for code, _ in found] == [0, 0], found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "eval", "doctor"])
def test_a_command_of_one_process_is_refused_once(tmp_path: Path, name: str) -> None:
    port = free_port()
    found = ended(
        [
            start(["-m", "scrimp", name], environment(tmp_path, **by_environment(rank, 2, port)))
            for rank in range(2)
        ]
    )
    assert [code for code, _ in found] == [2, 2]
    assert errors_of(found) == [f"error: scrimp {name} runs as one process"]


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    port = free_port()
    found = ended(
        [
            start(
                ["-m", "scrimp", "train"],
                environment(tmp_path, **by_environment(rank, 4, port), SCRIMP_JOIN_TIMEOUT="15"),
            )
            for rank in (0, 2)
        ]
    )
    assert [code for code, _ in found] == [2, 2]
    assert errors_of(found) == ["error: ranks 1 and 3 did not come"]
    assert "2 of 4 ranks" in found[0][1]
    assert "waiting for ranks 1 and 3, 15 s at most" in found[0][1]


@pytest.mark.slow
def test_a_rank_0_that_does_not_come_is_named(tmp_path: Path) -> None:
    environ = environment(tmp_path, **by_environment(1, 2, free_port()), SCRIMP_JOIN_TIMEOUT="3")
    found = ended([start(["-m", "scrimp", "train"], environ)])
    assert [code for code, _ in found] == [2]
    assert len(errors_of(found)) == 1
    assert "rank 0 cannot be reached at localhost:" in found[0][1]


@pytest.mark.slow
def test_two_processes_of_one_rank_are_named(tmp_path: Path) -> None:
    port = free_port()
    found = ended(
        [
            start(
                ["-m", "scrimp", "train"],
                environment(tmp_path, **by_environment(rank, 3, port), SCRIMP_JOIN_TIMEOUT="30"),
            )
            for rank in (0, 1, 1)
        ]
    )
    assert [code for code, _ in found] == [2, 2, 2]
    assert errors_of(found) == ["error: two processes say that they are rank 1"]


@pytest.mark.slow
def test_a_port_in_use_is_named_once(tmp_path: Path) -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = int(taken.getsockname()[1])
        found = ended(
            [
                start(
                    ["-m", "scrimp", "train"],
                    environment(tmp_path, **by_environment(rank, 2, port), SCRIMP_JOIN_TIMEOUT="5"),
                )
                for rank in range(2)
            ]
        )
    assert [code for code, _ in found] == [2, 2], found
    assert len(errors_of(found)) == 1
    assert f"error: port {port} of " in found[0][1]
    assert " is in use" in found[0][1]


@pytest.mark.slow
def test_an_unknown_host_is_named_once(tmp_path: Path) -> None:
    port = free_port()
    found = ended(
        [
            start(
                ["-m", "scrimp", "train"],
                environment(
                    tmp_path,
                    **by_environment(rank, 2, port, MASTER_ADDR="no-such-host.invalid"),
                    SCRIMP_JOIN_TIMEOUT="3",
                ),
            )
            for rank in range(2)
        ]
    )
    assert [code for code, _ in found] == [2, 2], found
    assert errors_of(found) == ["error: the host of rank 0, no-such-host.invalid, is not known"]


@pytest.mark.slow
def test_a_signal_ends_a_rank_that_waits(tmp_path: Path) -> None:
    port = free_port()
    rank = start(["-m", "scrimp", "train"], environment(tmp_path, **by_environment(0, 2, port)))
    wait_for(lambda: socket.socket().connect_ex(("localhost", port)) == 0)
    began = time.monotonic()
    rank.send_signal(signal.SIGTERM)
    ((code, output),) = ended([rank])
    assert code == 143, output
    assert time.monotonic() - began < 30  # not the 60 of the limit


OWN = """
from dataclasses import dataclass
import os
import torch
import torch.distributed as dist
from scrimp.health import record
from scrimp.objectives.next_token import NextToken

@dataclass(frozen=True)
class Talking(NextToken):
    "Talks with the other ranks in each step, as layouts do."
    def loss(self, model, batch, *, chunk=0):
        if os.environ["RANK"] == "1" and record().step == 4:
            {trouble}
        if record().step:
            dist.all_reduce(torch.ones(1000))
        return super().loss(model, batch, chunk=chunk)
"""


def talking(folder: Path, trouble: str, size: int = 2) -> list[tuple[int, str]]:
    """Exit codes and outputs of a run in whose fourth step the second rank has trouble."""
    code = folder / "own.py"
    code.write_text(OWN.format(trouble=trouble))
    more = ["--train.steps=1000", "--evaluation.every=0", f"--train.batch-tokens={128 * size}"]
    words = flags(write_corpus(folder), folder / "run", *more)
    words += [f"--objective.name={code}:Talking", "--trust-code"]
    return ended(start_ranks(size, words, environment(folder)))


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["os.kill(os.getpid(), 9)", "os._exit(3)"], ids=["killed", "exits"])
def test_a_rank_that_is_gone_from_a_models_own_collective_is_named_once(tmp_path: Path, trouble: str) -> None:
    found = talking(tmp_path, trouble, size=3)
    assert [code for code, _ in found] == [1, -9 if "kill" in trouble else 3, 1], found
    assert errors_of(found) == ["error: rank 1 is gone"]
    assert not any("Traceback" in output for _, output in found)


@pytest.mark.slow
def test_a_bug_on_one_rank_is_shown_by_it_alone(tmp_path: Path) -> None:
    """The others wait for it in a collective of the model: they notice when it has given up telling them."""
    found = talking(tmp_path, "raise ValueError('surprise')")
    assert [code for code, _ in found] == [1, 1], found
    assert found[1][1].count("Traceback") == 1
    assert "rank 1:\n" in found[1][1]
    assert "ValueError: surprise" in found[1][1]
    assert "Traceback" not in found[0][1]
    assert len(errors_of(found)) == 1


SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "localhost",
}


@pytest.mark.slow
def test_the_tasks_of_a_slurm_step_train_together(tmp_path: Path) -> None:
    words = flags(write_corpus(tmp_path), tmp_path / "run", "--train.steps=3")
    job = str(os.getpid())
    found = ended(
        [
            start(
                ["-m", "scrimp", *words],
                environment(
                    tmp_path,
                    **SLURM | {"SLURM_JOB_ID": job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                ),
            )
            for rank in range(2)
        ]
    )
    assert [code for code, _ in found] == [0, 0], found
    assert "report: " in found[0][1]
    assert found[1][1] == ""


def test_what_made_a_command_fail_is_found_behind_what_came_of_it() -> None:
    own, bug = ValueError("own"), KeyError("while it was handled")
    own.scrimp_told_by = None  # type: ignore[attr-defined]
    lost = RuntimeError(str(GLOO))
    lost.__context__ = own
    assert first_failure(lost) is own
    bug.__context__ = GLOO
    assert first_failure(bug) is GLOO
    assert first_failure(own) is own
    plain = RuntimeError("size mismatch")
    assert first_failure(plain) is plain
    assert not is_lost_connection(plain)
    assert is_lost_connection(GLOO)
    told = RuntimeError("told")
    told.scrimp_told_by, told.__context__ = 1, GLOO  # type: ignore[attr-defined]
    assert first_failure(told) is told
