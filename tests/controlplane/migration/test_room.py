"""Room for what waits at the gateway, and for what a draining worker holds: no promise is broken for it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from controlplane.migration import drain, overload
from controlplane.migration.move import MoveTerms
from controlplane.migration.overload import ShedSettings, forecast_of
from controlplane.migration.usage import worker_views
from controlplane.perfmodel.step import StepModel
from controlplane.snapshot import (
    Cached,
    HeldRequest,
    Load,
    Migrate,
    Pace,
    RunningRequest,
    Transport,
    WorkerLoad,
)
from controlplane.types import RequestId, WorkerId

STEP = StepModel(0.02, 1e-4, 1e-3, 5e-6)
SETTINGS = ShedSettings()
TPOT_S = 0.05


def request(name, tokens, still, priority=0):
    return RunningRequest(RequestId(name), tokens, priority, 5, still, TPOT_S)


def worker(name, sizes, state="serving", capacity=1000, kind="", seqs=64, waiting=()):
    running = tuple(request(f"{name}{i}", *size) for i, size in enumerate(sizes))
    queue = tuple(request(f"{name}q{i}", *size) for i, size in enumerate(waiting))
    return WorkerLoad(
        WorkerId(name), state, capacity, running, queue, STEP, seqs, kind=kind, kv_bytes_per_token=1e5
    )


def held(tokens, still=50, left_s=5.0, name="h"):
    return HeldRequest(request(name, tokens, still), left_s)


def make_room(*workers, line, resting=frozenset(), recent=frozenset(), pace=None):
    views = worker_views(workers)
    return overload.make_room(SETTINGS, views, line, MoveTerms(resting, recent, Transport(pace or Pace())))


def named(moves):
    return [(move.request, move.source, move.target) for move in moves]


def after(workers, moves):
    """The fleet once the moves are done."""
    rows = {w.worker: list(w.requests) for w in workers}
    for move in moves:
        [r] = [r for r in rows[move.source] if r.request == move.request]
        rows[move.source].remove(r)
        rows[move.target].append(r)
    return [replace(w, requests=tuple(rows[w.worker])) for w in workers]


# Two gaps of 300 tokens each, and a request that needs 500.
GAPS = worker("a", [(300, 50), (100, 40), (120, 40)]), worker("b", [(400, 50), (100, 60)])


def test_what_fits_no_worker_but_would_fit_two_gaps_gets_one_of_them():
    [move] = make_room(*GAPS, line=[held(430)])
    assert (move.request, move.source, move.target) == ("b1", "b", "a")
    assert "waits at the gateway" in move.reason
    view = {v.id: v for v in worker_views(after(GAPS, [move]))}
    assert forecast_of(view["b"], SETTINGS, held(430).request).worst <= 1.0


def test_nothing_moves_for_what_fits_already_or_would_fit_nowhere():
    assert make_room(*GAPS, line=[held(100)]) == []
    assert make_room(*GAPS, line=[held(900)]) == []
    assert make_room(*GAPS, line=[]) == []


def test_a_copy_that_would_end_too_late_is_not_begun():
    assert make_room(*GAPS, line=[held(430, left_s=0.005)]) == []
    assert make_room(*GAPS, line=[held(430, left_s=1.0)], pace=Pace(5e6)) == []
    assert len(make_room(*GAPS, line=[held(430, left_s=1.0)], pace=Pace(5e7))) == 1


def test_a_request_goes_where_it_fits_best_within_its_kind():
    full, open_ = worker("b", [(400, 50), (100, 60)], kind="x"), worker("c", [(620, 40)], kind="x")
    near = worker("d", [(680, 20)], kind="x")
    other = worker("e", [(700, 20)], kind="y")
    moves = make_room(full, open_, near, other, line=[held(430)])
    assert named(moves) == [("b1", "b", "d")]


def test_what_rests_stays_and_a_pair_is_not_turned_round():
    assert "b1" not in [m.request for m in make_room(*GAPS, line=[held(430)], resting={"b1"})]
    assert "b" not in [m.source for m in make_room(*GAPS, line=[held(430)], recent={("a", "b")})]


sizes = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 200), st.integers(0, 1)), min_size=0, max_size=5
)
shapes = st.lists(
    st.tuples(sizes, st.sampled_from(["serving", "serving", "serving", "draining"])), min_size=2, max_size=5
)
lines = st.lists(st.tuples(st.integers(1, 900), st.integers(1, 200)), min_size=1, max_size=4)


@given(shapes, lines)
def test_no_move_breaks_a_promise_that_held_and_each_lets_one_in(shapes, line):
    fleet = [worker(f"w{i}", running, state) for i, (running, state) in enumerate(shapes)]
    line = [held(tokens, still, name=f"h{i}") for i, (tokens, still) in enumerate(line)]
    moves = make_room(*fleet, line=line)
    before = {v.id: forecast_of(v, SETTINGS).worst for v in worker_views(fleet)}
    then = {v.id: v for v in worker_views(after(fleet, moves))}
    assert sum(v.load.held_tokens for v in then.values()) == sum(
        v.load.held_tokens for v in worker_views(fleet)
    )
    ends = [end for move in moves for end in (move.source, move.target)]
    assert len(ends) == len(set(ends))
    for move in moves:
        assert forecast_of(then[move.target], SETTINGS).worst <= 1.0
        assert forecast_of(then[move.source], SETTINGS).worst <= before[move.source]
        assert any(forecast_of(then[move.source], SETTINGS, h.request).worst <= 1.0 for h in line)


def next_off(source, *fleet, busy=frozenset()):
    """The move with which the emptying of `source` goes on."""
    serving = [view for view in worker_views(fleet) if view.worker.state == "serving"]
    went = drain.next_off(SETTINGS, source, source.requests, lambda _: [serving], busy)
    return None if went is None else Migrate(went[0].request, source.worker, went[1].id, "")


def emptied(*fleet):
    """The fleet once the first worker is as empty as it gets, and who went, in order."""
    went = []
    while move := next_off(*fleet):
        fleet = after(fleet, [move])
        went.append(move)
    return fleet, went


@given(shapes)
def test_a_draining_worker_empties_into_what_it_fits_the_largest_first(shapes):
    fleet = [worker(f"w{i}", running, state) for i, (running, state) in enumerate(shapes)]
    fleet[0] = replace(fleet[0], state="draining")
    states = {w.worker: w.state for w in fleet}
    total = sum(r.tokens for w in fleet for r in w.requests)
    size = {r.request: r.tokens for w in fleet for r in w.requests}
    there, went = emptied(*fleet)
    for move in went:
        assert states[move.target] == "serving"
    view = {v.id: v for v in worker_views(there)}
    for target in {move.target for move in went}:
        assert forecast_of(view[target], SETTINGS).worst <= 1.0
    assert [size[move.request] for move in went] == sorted((size[m.request] for m in went), reverse=True)
    assert sum(r.tokens for w in there for r in w.requests) == total


def test_draining_packs_the_fullest_worker_so_that_another_stays_empty():
    leaving = worker("a", [(100, 20), (150, 20)], state="draining")
    there, _ = emptied(leaving, worker("b", [(400, 50)]), worker("c", [(10, 5)]), worker("d", []))
    assert [len(w.requests) for w in there] == [0, 3, 1, 0]


def knowing(one, cached):
    """The worker, whose requests others have in part cached: tokens, and those in use, by worker."""
    known = tuple(replace(r, cached=lambda w: Cached(*cached.get(w, (0, 0)))) for r in one.requests)
    return replace(one, requests=known)


def test_what_leaves_a_draining_worker_goes_where_most_of_it_is_cached_of_those_that_it_fits():
    leaving = worker("a", [(100, 20)], state="draining")
    others = worker("b", [(400, 50)]), worker("c", [(10, 5)]), worker("full", [(960, 20)])

    def target(**cached):
        return next_off(knowing(leaving, cached), *others).target

    assert target() == "b"
    assert target(c=(64, 0)) == "c"
    assert target(b=(60, 0), c=(64, 0)) == "b"  # less than a tenth apart
    assert target(full=(96, 0)) == "b"


def test_a_request_takes_no_memory_where_others_use_what_it_shares_with_them():
    leaving = worker("a", [(500, 20)], state="draining")
    shares = replace(
        worker("b", [(500, 20), (400, 20)]), load=Load(2, 900, growth_tokens=40, shared_tokens=300)
    )
    assert next_off(leaving, shares) is None
    assert next_off(knowing(leaving, {"b": (480, 0)}), shares) is None  # it sleeps there
    assert next_off(knowing(leaving, {"b": (480, 300)}), shares).target == "b"


def test_a_copy_of_little_that_is_not_cached_ends_in_time():
    a, b = GAPS
    slow = Pace(5e6)
    assert make_room(a, b, line=[held(430, left_s=1.0)], pace=slow) == []
    known = knowing(b, {"a": (90, 0)})
    assert named(make_room(a, known, line=[held(430, left_s=1.0)], pace=slow)) == [("b1", "b", "a")]


def test_one_leaves_at_a_time_and_to_no_worker_that_takes_part_in_another_move():
    fleet = worker("a", [(100, 20)], state="draining"), worker("b", [(400, 50)]), worker("c", [(10, 5)])
    assert next_off(*fleet).target == "b"
    assert next_off(*fleet, busy={"b"}).target == "c"
    assert next_off(*fleet, busy={"b", "c"}) is next_off(*fleet, busy={"a"}) is None


def test_what_leaves_stays_within_its_kind_for_as_long_as_that_has_a_worker():
    leaving = worker("a", [(500, 50)], state="draining", kind="x")
    full, other = worker("b", [(600, 50)], kind="x"), worker("c", [(10, 5)], kind="y")
    assert next_off(leaving, full, other) is None
    assert next_off(leaving, other).target == "c"


BLOCK = 16


def text(number, ids, **cached):
    """A text of these blocks; `cached`: blocks that workers have of it."""
    return drain.Text(number, BLOCK, ids, lambda w: Cached(BLOCK * cached.get(w, 0)))


def brought(copies):
    return [(c.text.number, c.source, c.target, c.tokens, c.lacks) for c in copies]


def pulled(texts, *targets, tokens=10_000):
    return brought(drain.pulled_along(texts, WorkerId("a"), worker_views(targets), tokens))


EMPTY = worker("b", []), worker("c", [])


def test_what_only_the_leaving_worker_has_goes_along_and_each_text_once():
    conversation = [text(1, range(10), a=10), text(0, range(6), a=6)]
    assert pulled(conversation, *EMPTY[:1]) == [(1, "a", "b", 160, 160)]
    assert pulled([text(0, range(6), a=6, b=6), text(1, [9]), text(2, [8], c=1)], *EMPTY) == []
    assert pulled(conversation) == []


def test_what_goes_along_goes_where_its_next_turn_will_least_work_first():
    shares = text(0, range(10), a=10, c=3)
    assert pulled([shares], *EMPTY) == [(0, "a", "c", 160, 112)]
    busy = worker("c", [], waiting=[(200, 5)])
    assert pulled([shares], EMPTY[0], busy) == [(0, "a", "b", 160, 160)]
    # Two with the same beginning: the second finds it where the first went.
    others = [text(1, [*range(5), 50], a=6), text(2, [*range(5), 60], a=6)]
    assert pulled(others, *EMPTY)[1] == (2, "a", "b", 96, 16)


def test_what_goes_along_is_bounded_by_time_and_by_half_of_the_memory_that_is_free():
    texts = [text(n, range(100 * n, 100 * n + 10), a=10) for n in range(9)]
    assert [n for n, *_ in pulled(texts, EMPTY[0])] == [0, 1, 2]  # 480 of 1,000 tokens
    assert [n for n, *_ in pulled(texts, worker("b", [(600, 10)]))] == [0]
    assert [n for n, *_ in pulled(texts, *EMPTY, tokens=330)] == [0, 1]


def test_a_newcomer_is_given_its_share_of_conversations():
    texts = [text(n, range(100 * n, 100 * n + 2), **{"ab"[n % 2]: 2}) for n in range(9)]
    turns = [t for n in range(9) for t in (texts[n], text(n + 9, [100 * n], a=1, b=1))]
    [new] = worker_views([worker("n", [])])
    given = brought(drain.warmed(turns, new, [WorkerId("a"), WorkerId("b")], 10_000))
    assert given == [(2, "a", "n", 32, 32), (5, "b", "n", 32, 32), (8, "a", "n", 32, 32)]
    assert drain.warmed(texts, new, [], 10_000) == []


many = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 12), st.lists(st.integers(0, 12), min_size=3, max_size=3)),
    max_size=20,
)


@given(many, st.integers(0, 2000), st.integers(0, 900))
def test_no_copy_lacks_what_is_there_nor_exceeds_time_or_memory(shapes, tokens, held_tokens):
    texts = [
        text(
            n,
            range(100 * root, 100 * root + blocks),
            **dict(zip("abc", map(min, had, [blocks] * 3), strict=True)),
        )
        for n, (root, blocks, had) in enumerate(shapes)
    ]
    targets = worker("b", [(held_tokens, 5)] if held_tokens else []), worker("c", [])
    copies = drain.pulled_along(texts, WorkerId("a"), worker_views(targets), tokens)
    assert sum(c.lacks for c in copies) <= tokens
    for w in targets:
        free = w.capacity_tokens - sum(r.tokens for r in w.requests)
        assert sum(c.lacks for c in copies if c.target == w.worker) <= drain.SHARE * free
    for c in copies:
        assert 0 < c.lacks <= c.tokens - c.text.cached(c.target).tokens
        assert c.tokens == c.text.cached(WorkerId("a")).tokens
    assert len({(c.target, c.tokens, tuple(c.text.ids[: c.tokens // BLOCK])) for c in copies}) == len(copies)
