"""A worker's share of its host's cores, and the end of Ray's daemon there."""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.live.engine_api.processes import Cores, RayDaemon

CORES = list(range(2, 11))  # the first is left to what is no engine


def claimed(ranks, shares, fleet="secret", cores=CORES):
    claim = Cores(ranks, shares, fleet, cores)
    return claim, claim.binding.split("|")


def let_go(claim):
    """As the kernel does when a worker's process ends."""
    for held in claim._claims:
        held.close()


def free(claims):
    for claim, _ in claims:
        let_go(claim)


@given(st.integers(1, 12), st.lists(st.integers(1, 3), min_size=1, max_size=12), st.integers(0, 11))
def test_shares_are_held_evenly_and_what_a_worker_leaves_the_next_one_takes(shares, workers, gone):
    claims, gone = [claimed(ranks, shares) for ranks in workers], gone % len(workers)
    held = Counter(share for _, bindings in claims for share in bindings)
    cores = len(CORES) - (len(CORES) > shares)
    most = cores // max(1, cores // shares)
    let_go(claims[gone][0])
    claims[gone] = claimed(workers[gone], shares)
    again = Counter(share for _, bindings in claims for share in bindings)
    free(claims)
    assert again == held
    assert len(held) == min(sum(workers), most)
    assert max(held.values()) - min(held.values()) <= (len(held) == most)


def test_each_rank_has_its_own_share_and_a_share_that_was_left_is_taken_first():
    claims = [claimed(2, 4), claimed(1, 4), claimed(1, 4)]
    assert [bindings for _, bindings in claims] == [["3,4", "5,6"], ["7,8"], ["9,10"]]
    let_go(claims[1][0])
    claims.append(claimed(1, 4))
    assert claims[-1][1] == ["7,8"]
    free(claims)


def test_more_shares_than_cores_are_shared():
    claims = [claimed(1, 20, cores=[0, 1]) for _ in range(4)]
    assert [bindings for _, bindings in claims] == [["0"], ["1"], ["0"], ["1"]]
    free(claims)


@given(st.integers(1, 12), st.integers(1, 12))
def test_a_core_is_left_to_what_is_no_engine_where_there_are_enough(cores, shares):
    claims = [claimed(1, shares, cores=list(range(cores))) for _ in range(shares)]
    used = {int(core) for _, bindings in claims for share in bindings for core in share.split(",")}
    free(claims)
    assert (0 in used) == (cores <= shares)


def test_fleets_do_not_know_each_other():
    claims = [claimed(1, 8, "one"), claimed(1, 8, "two")]
    assert claims[0][1] == claims[1][1] == ["3"]
    free(claims)


def own_name():
    return Path("/proc/self/comm").read_text().strip()


@pytest.mark.parametrize("name", ["raylet", "the parent's", "its own"])
def test_a_process_whose_parent_lives_has_its_daemon(name):
    parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    assert not RayDaemon({"the parent's": parent, "its own": own_name()}.get(name, name)).is_gone


def test_a_process_whose_daemon_has_ended_has_none():
    told, go = os.pipe(), os.pipe()
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            daemon = RayDaemon(own_name())  # its parent is a copy of this process
            os.write(told[1], b"here")
            os.close(go[1])
            os.read(go[0], 1)  # until the parent's end of it is closed, too
            while not daemon.is_gone:
                pass
            os.write(told[1], b"gone")
            os._exit(0)
        os.read(told[0], 4)  # it has seen its parent
        os._exit(0)
    os.close(go[1])
    os.waitpid(middle, 0)
    assert os.read(told[0], 4) == b"gone"
    for end in (*told, go[0]):
        os.close(end)
