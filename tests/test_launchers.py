"""What launchers leave in the environment, right and wrong, and which rank it makes of a process."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.errors import ConfigError
from scrimp.launchers import FIRST_PORT, PORTS, RANK_ORDER, hosts_of, order_of, place_of, seconds_in

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-b",
    "MASTER_PORT": "29512",
    "TORCHELASTIC_RUN_ID": "77",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODELIST": "gpu[01-08]",
    "SLURM_NTASKS": "4",
}
BATCH = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "1",
    "SLURM_NNODES": "2",
}


@pytest.fixture(autouse=True)
def _no_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def test_torchrun_says_all_of_it() -> None:
    place = place_of(TORCHRUN | SLURM)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert (place.address, place.port, place.job) == ("node-b", 29512, "77")
    assert (place.launcher, place.agent_hosts_store, place.hosts_store) == ("torchrun", True, False)


def test_a_slurm_step_of_several_tasks_meets_at_its_first_host() -> None:
    place = place_of(SLURM)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 1, None)
    assert (place.address, place.launcher) == ("gpu07", "Slurm")
    assert FIRST_PORT <= place.port < FIRST_PORT + PORTS
    other = place_of(SLURM | {"SLURM_JOB_ID": "1234568", "MASTER_ADDR": "10.0.0.1"})
    assert other is not None
    assert (other.address, other.port - place.port) == ("10.0.0.1", 1)
    named = place_of(SLURM | {"MASTER_PORT": "4000"})
    assert named is not None
    assert named.port == 4000


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "3", "MASTER_PORT": "1", "SLURM_STEP_NUM_TASKS": "4"},
    ],
    ids=["nothing", "a batch script", "an interactive step", "one rank", "one", "what says nothing"],
)
def test_one_process_is_alone(environ: dict[str, str]) -> None:
    assert place_of(environ) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"RANK": "8"}, "RANK"),
        ({"RANK": "-1"}, "RANK"),
        ({"RANK": "x"}, "RANK"),
        ({"RANK": None}, "RANK is missing"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "٣"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT"),
        ({"MASTER_PORT": None}, "MASTER_PORT is missing"),
    ],
)
def test_what_torchrun_cannot_have_set_is_refused_by_name(changed: dict[str, str | None], named: str) -> None:
    environ = {key: value for key, value in (TORCHRUN | changed).items() if value is not None}
    with pytest.raises(ConfigError, match=named):
        place_of(environ)


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_PROCID": "4"},
        {"SLURM_STEP_NUM_TASKS": "many"},
        {"SLURM_STEP_NODELIST": "gpu[7-"},
        {"SLURM_JOB_ID": ""},
        {"SLURM_STEP_NODELIST": "", "SLURM_NODELIST": ""},
    ],
    ids=str,
)
def test_what_slurm_cannot_have_set_is_refused_by_name(changed: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="SLURM_"):
        place_of(SLURM | changed)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("node1", "node1"),
        ("node[03-07,12],gpu1", "node03 node04 node05 node06 node07 node12 gpu1"),
        ("a[9-11]-ib", "a9-ib a10-ib a11-ib"),
        ("r[1-2]n[08-09]", "r1n08 r1n09 r2n08 r2n09"),
        ("n1.example.org,n2", "n1.example.org n2"),
    ],
)
def test_hosts_are_those_of_the_list(nodes: str, hosts: str) -> None:
    assert hosts_of(nodes) == hosts.split()


@pytest.mark.parametrize(
    "nodes",
    ["", ",", "a,,b", "a[", "a]", "a[]", "a[1-]", "a[2-1]", "a[x]", "a b", "a;rm", "[[1]]", "a[0-999999999]"],
)
def test_what_is_no_list_of_hosts_is_refused(nodes: str) -> None:
    with pytest.raises(ConfigError, match="list of nodes"):
        hosts_of(nodes)


@given(st.text(alphabet="a-1[],.9 ", max_size=24))
def test_any_text_is_hosts_or_refused(nodes: str) -> None:
    try:
        hosts = hosts_of(nodes)
    except ConfigError:
        return
    assert hosts
    assert all(re.fullmatch(r"[\w.-]+", host) for host in hosts)


def test_a_limit_is_a_number_above_0() -> None:
    assert seconds_in({}, "X", 3.5) == 3.5
    assert seconds_in({"X": "0.5"}, "X", 3.5) == 0.5
    for text in ("0", "-1", "nan", "inf", "soon", "1e99"):
        with pytest.raises(ConfigError, match="X is wrong"):
            seconds_in({"X": text}, "X", 3.5)


def test_an_order_of_ranks_has_each_of_them_once_and_rank_0_first() -> None:
    assert order_of({}, 4) is None
    assert order_of({RANK_ORDER: " "}, 4) is None
    assert order_of({RANK_ORDER: "0,2, 1,3"}, 4) == (0, 2, 1, 3)
    # A job may go on with fewer ranks than it began with.
    assert order_of({RANK_ORDER: "0,2,1,3"}, 3) is None
    for wrong in ("0,1,1,3", "1,0,2,3", "0,1,2,4", "0;1;2;3", "0,-1", "0,x", ",", "0,1,2,", "0,²"):
        with pytest.raises(ConfigError, match="is no order of ranks"):
            order_of({RANK_ORDER: wrong}, 4)
