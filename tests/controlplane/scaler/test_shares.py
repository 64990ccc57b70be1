"""Shares: the division against brute force, limits at every moment, and that nothing goes to and fro."""

import math
from dataclasses import replace
from itertools import product

import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.scaler.shares import (
    Claims,
    Limits,
    Patience,
    Tenant,
    divide,
    most_workers,
    rights,
    share_out,
    value,
)

PATIENCE = Patience(spare_s=5.0, needed_s=80.0)
GPUS = ("h100", "a100")
ZONES = ("east", "west")


def tenant(model="m", gpus=1, right=2, gpu="h100", **now):
    return Tenant(model, gpu, gpus, 2.0 * gpus, right, **now)


@st.composite
def portfolios(draw):
    """Up to four models, what they ask for, and limits under which each may have its floor."""
    zones = ZONES if draw(st.booleans()) else (None,)
    part = draw(st.sampled_from((0.5, 0.25)))
    tenants = [
        tenant(
            f"m{i}",
            draw(st.sampled_from((part, part, 1, 1, 2, 4))),
            draw(st.integers(1, 4)),
            draw(st.sampled_from(GPUS)),
            zone=draw(st.sampled_from(zones)),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    least = {gpu: math.ceil(sum(p.gpus for p in tenants if p.gpu == gpu)) for gpu in GPUS}
    whole = sum(math.ceil(p.gpus) for p in tenants)
    more = st.integers(0, 8)
    by_type = {gpu: n + draw(more) for gpu, n in least.items() if draw(st.booleans())}
    in_all = whole
    max_gpus = in_all + draw(more) if draw(st.booleans()) else None
    tenants = [replace(p, fixed_usd_per_h=draw(st.sampled_from((0.0, 0.0, 1.5)))) for p in tenants]
    fixed = sum(p.fixed_usd_per_h for p in tenants)
    usd = 2.0 * in_all + fixed + draw(more) if draw(st.booleans()) else None
    pairs = sorted({(p.zone, p.gpu) for p in tenants if p.zone})
    floors = {pair: math.ceil(sum(p.gpus for p in tenants if (p.zone, p.gpu) == pair)) for pair in pairs}
    limits = Limits(by_type, max_gpus, usd, {pair: n + draw(more) for pair, n in floors.items()})
    own = rights(tenants, limits)
    return [replace(p, right=own[p.model], share=own[p.model]) for p in tenants], limits


def wanting(draw, p):
    asked = draw(st.integers(1, 6))
    return replace(p, asked=asked, needed=draw(st.integers(0, asked)))


@examples(60)
@given(st.data())
def test_no_other_division_within_the_limits_is_worth_more(data):
    tenants, limits = data.draw(portfolios())
    tenants = [wanting(data.draw, p) for p in tenants]
    kept = {p.model: data.draw(st.integers(0, p.asked)) for p in tenants}
    least = {p.model: max(p.floor, min(p.needed, p.right)) for p in tenants}
    found = divide(tenants, limits, least, kept)

    def worth(counts):
        return sum(
            value(p, k, kept[p.model])
            for p, n in zip(tenants, counts, strict=True)
            for k in range(least[p.model] + 1, n + 1)
        )

    ranges = [range(least[p.model], max(p.wants, least[p.model]) + 1) for p in tenants]
    best = max(worth(counts) for counts in product(*ranges) if limits.hold(tenants, counts))
    counts = [found[p.model] for p in tenants]
    assert limits.hold(tenants, counts)
    assert worth(counts) == pytest.approx(best)


@examples(40)
@given(st.data())
def test_limits_hold_at_every_moment_while_workers_come_and_go_as_they_please(data):
    tenants, limits = data.draw(portfolios())
    claims, now_s = Claims(), 0.0
    tenants = [replace(p, held=p.share) for p in tenants]
    for _ in range(data.draw(st.integers(1, 12))):
        now_s += data.draw(st.sampled_from((0.5, 6.0, 100.0)))
        tenants = [
            replace(wanting(data.draw, p), is_heard=data.draw(st.integers(0, 9)) > 0)
            if p.is_heard or data.draw(st.booleans())
            else p
            for p in tenants
        ]
        claims, told = share_out(PATIENCE, claims, tenants, limits, now_s)
        assert all(told[p.model] >= min(p.floor, p.share) for p in tenants)
        assert all(told[p.model] == p.share for p in tenants if not p.is_heard)
        tenants = [replace(p, share=told[p.model]) for p in tenants]
        # A fleet has at most its share, or is on the way down to it.
        for _ in range(3):
            tenants = [
                replace(p, held=data.draw(st.integers(min(p.held, p.share), max(p.held, p.share))))
                for p in tenants
            ]
            assert limits.hold(tenants, [p.held for p in tenants])


@examples(30)
@given(st.data())
def test_each_model_comes_to_have_what_it_needs_of_its_right_and_then_nothing_changes(data):
    tenants, limits = data.draw(portfolios())
    tenants = [replace(wanting(data.draw, p), held=p.share) for p in tenants]
    claims, now_s, told = Claims(), 0.0, {}
    for look in range(80):
        now_s += 10.0
        before = told
        claims, told = share_out(PATIENCE, claims, tenants, limits, now_s)
        assert look < 40 or told == before
        tenants = [replace(p, share=told[p.model], held=min(p.asked, told[p.model])) for p in tenants]
    for p in tenants:
        assert p.share >= max(p.floor, min(p.needed, p.right))
        assert p.share <= max(p.floor, p.asked)


def two(limit=4, **now):
    """Two models with a right to two workers each: `chat` has three, and `code` one."""
    chat = tenant("chat", asked=3, needed=3, share=3, held=3)
    code = tenant("code", asked=1, needed=1, share=1, held=1)
    return [replace(chat, **now.get("chat", {})), replace(code, **now.get("code", {}))], Limits(
        {"h100": limit}
    )


def shares_over(tenants, limits, seconds):
    """The first moment, in seconds, at which the shares change, and to what; None where they do not."""
    claims = Claims()
    for now_s in range(seconds):
        claims, told = share_out(PATIENCE, claims, tenants, limits, float(now_s))
        if told != {p.model: p.share for p in tenants}:
            return now_s, told
    return None


def test_a_right_is_claimed_at_once_and_given_once_the_other_has_drained():
    tenants, limits = two(code={"asked": 2, "needed": 2})
    assert shares_over(tenants, limits, 1) == (0, {"chat": 2, "code": 1})
    draining = [replace(tenants[0], share=2), tenants[1]]
    assert shares_over(draining, limits, 500) is None  # its GPU is still taken
    assert shares_over([replace(draining[0], held=2), tenants[1]], limits, 1) == (0, {"chat": 2, "code": 2})


def test_what_is_asked_for_but_not_needed_is_taken_only_after_a_while():
    tenants, limits = two(chat={"right": 3, "needed": 2}, code={"right": 1, "asked": 2, "needed": 2})
    assert shares_over(tenants, limits, 100) == (5, {"chat": 2, "code": 1})


def test_what_is_free_goes_to_nobody_who_does_not_need_it():
    tenants, limits = two(limit=6, chat={"asked": 4, "needed": 2}, code={"asked": 2, "needed": 1})
    assert shares_over(tenants, limits, 500) is None


def test_what_both_need_beyond_their_rights_stays_where_it_is_for_longer():
    chat = {"right": 1, "asked": 4, "needed": 4, "share": 4, "held": 4}
    code = {"right": 1, "asked": 4, "needed": 4}
    tenants, limits = two(limit=5, chat=chat, code=code)
    assert shares_over(tenants, limits, 200) == (80, {"chat": 3, "code": 1})
    even = two(limit=5, chat={**chat, "share": 3, "held": 3}, code={**code, "share": 2, "held": 2})
    assert shares_over(*even, 1000) is None  # the odd one stays with who has it


def test_beyond_all_rights_who_is_least_above_its_own_has_the_rest():
    tenants = [tenant("chat", right=3, asked=9, needed=9), tenant("code", right=1, asked=9, needed=9)]
    assert divide(tenants, Limits({"h100": 8}), {"chat": 3, "code": 1}, {}) == {"chat": 6, "code": 2}


def test_rights_are_the_plan_where_it_fits_and_fair_parts_of_the_limits_where_it_does_not():
    tenants = [tenant("chat", right=6), tenant("code", right=2)]
    assert rights(tenants, Limits({"h100": 8})) == {"chat": 6, "code": 2}
    assert rights(tenants, Limits({"h100": 4})) == {"chat": 3, "code": 1}
    with pytest.raises(BadInput, match=r"no room for the least of each model \(chat 1 h100, code 1 h100\)"):
        rights(tenants, Limits({"h100": 1}))


def test_a_model_may_have_what_the_floors_of_others_leave_it():
    tenants = [tenant("chat", gpus=2), tenant("code", gpus=4)]
    assert most_workers(tenants[0], tenants, Limits({"h100": 16}), 100) == 6
    assert most_workers(tenants[0], tenants, Limits({"a100": 16}), 100) == 100
    assert most_workers(tenants[0], tenants, Limits({}, usd_per_h=20.0), 100) == 3


def test_what_workers_on_demand_cost_more_is_of_the_budget_however_many_there_are():
    # Two of $5 and the rest of $2, and workers of $2 alone.
    tenants = [tenant("chat", right=6, fixed_usd_per_h=2 * 3.0), tenant("code", right=6)]

    def usd(workers):
        return sum(5.0 if i < 2 else 2.0 for i in range(workers[0])) + 2.0 * workers[1]

    limits = Limits({}, usd_per_h=22.0)
    for workers in product(range(1, 9), repeat=2):
        ((name, used, most),) = limits.used(tenants, workers)
        assert (name, most) == ("budget-usd-per-h", 22.0)
        assert used == usd(workers) if workers[0] >= 2 else used > usd(workers)
        assert limits.hold(tenants, workers) == (used <= 22.0)
    told = rights(tenants, limits)
    assert (sum(told.values()), usd(list(told.values()))) == (8, 22.0)
    assert most_workers(tenants[1], tenants, limits, 100) == 7


def test_parts_of_gpus_count_as_the_whole_ones_they_are_on():
    def used(limits, **workers):
        tenants = [tenant(name, 0.5, zone="east" if name == "mail" else "west") for name in workers]
        whole = tenant("whole", 1, zone="west")
        return limits.used([*tenants, whole], [*workers.values(), 1])

    limits = Limits({"h100": 9}, max_gpus=9, usd_per_h=20.0, zones={("west", "h100"): 3})
    taken = {name: n for name, n, _ in used(limits, chat=1, code=2, mail=1)}
    # Three halves in the west are on two GPUs, that in the east has one to itself.
    assert taken == {"gpus.h100": 4, "zones.west.h100": 3, "max-gpus": 4, "budget-usd-per-h": 8.0}
    assert [n for _, n, _ in used(limits, chat=2, code=2)] == [3, 3, 3, 6.0]
    halves = [tenant(name, 0.5) for name in ("chat", "code", "mail")]
    assert most_workers(halves[0], halves, Limits({"h100": 2}), 100) == 2
    assert most_workers(halves[0], [*halves, tenant("whole")], Limits({}, usd_per_h=6.5), 100) == 2
    asking = [replace(p, right=1, asked=3, needed=3) for p in halves]
    told = divide(asking, Limits({"h100": 2}), dict.fromkeys(("chat", "code", "mail"), 1), {})
    assert sorted(told.values()) == [1, 1, 2]
    with pytest.raises(BadInput, match=r"of each model \(chat 0.5 h100, code 0.5 h100, mail 0.5 h100\)"):
        rights(halves, Limits({"h100": 1}))


def test_a_gpu_of_one_zone_goes_to_no_model_in_another():
    chat = tenant("chat", asked=4, needed=4, share=2, held=2, zone="east")
    code = tenant("code", asked=1, needed=1, share=2, held=2, zone="east")
    mail = tenant("mail", right=1, asked=1, needed=1, share=1, held=1, zone="west")
    limits = Limits({"h100": 9}, zones={("east", "h100"): 4, ("west", "h100"): 5})
    # What code no longer needs is chat's once it has drained; the four that are free in the west are not.
    assert shares_over([chat, code, mail], limits, 500) == (0, {"chat": 2, "code": 1, "mail": 1})
    let_go = [chat, replace(code, share=1, held=1), mail]
    assert shares_over(let_go, limits, 500) == (0, {"chat": 3, "code": 1, "mail": 1})
    given = [replace(chat, share=3, held=3), *let_go[1:]]
    assert shares_over(given, limits, 500) is None
    assert most_workers(chat, given, limits, 100) == 3
    assert shares_over([replace(p, zone=None) for p in given], limits, 500) == (
        0,
        {"chat": 4, "code": 1, "mail": 1},
    )
    with pytest.raises(BadInput, match=r"of each model \(chat 1 h100 in east, code 1 h100 in east, mail 1"):
        rights(given, replace(limits, zones={("east", "h100"): 1}))
