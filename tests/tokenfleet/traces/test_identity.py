"""Prefixes that a trace's requests share, and requests they wait for, as files of each format tell them."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.prefixes import Prefixes, Sessions
from controlplane.workload import Workload
from tokenfleet.traces import Trace, merged, read_trace
from tokenfleet.traces.identity import SystemPrompts, follow_lengths
from tokenfleet.traces.writers import write_trace

TALK = "arrival_s,prompt_tokens,output_tokens,session,turn"


def read(folder: Path, text: str) -> Trace:
    path = folder / "trace"
    path.write_text(text)
    return read_trace(path)


def mooncake(*rows: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)


def lists(trace: Trace) -> list[list[int]]:
    prefixes = trace.workload.prefixes
    assert prefixes is not None
    return [prefixes.of(r).tolist() for r in range(len(prefixes))]


def waits(trace: Trace) -> list[list[int]]:
    sessions = trace.workload.sessions
    assert sessions is not None
    return [each.tolist() for each in np.split(sessions.before, sessions.offsets[1:-1])]


def shared_tokens(trace: Trace, one: int, other: int) -> int:
    """The length of what two requests have in common, as their ids say it."""
    prefixes = trace.workload.prefixes
    assert prefixes is not None
    a, b = prefixes.of(one), prefixes.of(other)
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return (n if same.all() else int(np.argmin(same))) * prefixes.block_tokens


# hash_ids


def test_only_full_blocks_that_two_requests_have_are_named(tmp_path: Path) -> None:
    trace = read(
        tmp_path, mooncake((0, 1100, 1, [7, 8, 9]), (1, 1536, 1, [7, 8, 10]), (2, 1030, 1, [7, 11, 9]))
    )
    assert trace.workload.prefixes is not None
    assert trace.workload.prefixes.block_tokens == 512
    assert shared_tokens(trace, 0, 1) == 1024
    assert shared_tokens(trace, 0, 2) == 512
    assert [len(ids) for ids in lists(trace)] == [2, 2, 1]


def test_blocks_that_a_later_prompt_adds_are_the_earlier_answer_as_far_as_it_reaches(tmp_path: Path) -> None:
    # 1,100 tokens and an answer of 1,000: the third and the fourth block hold it.
    trace = read(
        tmp_path,
        mooncake(
            (0, 1100, 1000, [0, 1, 2]), (9, 3000, 5, [0, 1, 3, 4, 5, 6]), (10, 3000, 5, [0, 1, 3, 4, 5, 6])
        ),
    )
    assert shared_tokens(trace, 0, 1) == 2048
    assert shared_tokens(trace, 1, 2) == 2560


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 1100, 1000, [0, 1, 2]), (9, 2000, 5, [0, 1, 3, 4])),  # too short for the answer
        ((0, 1100, 1000, [0, 1, 2]), (9, 3000, 5, [0, 8, 3, 4, 5, 6])),  # another prompt
    ],
)
def test_a_prompt_that_does_not_continue_another_shares_its_prompt_alone(
    tmp_path: Path, first: tuple[int, int, int, list[int]], second: tuple[int, int, int, list[int]]
) -> None:
    trace = read(tmp_path, mooncake(first, second))
    prompts = sum(a == b for a, b in zip(first[3], second[3], strict=False))
    assert shared_tokens(trace, 0, 1) == prompts * 512


def test_an_answer_is_shared_only_where_its_request_brought_the_last_block(tmp_path: Path) -> None:
    # The first two begin with one system prompt; which of them the third continues is not known.
    trace = read(
        tmp_path,
        mooncake((0, 600, 600, [0, 1]), (1, 600, 600, [0, 2]), (9, 2000, 5, [0, 3, 4, 5])),
    )
    assert shared_tokens(trace, 0, 2) == 1024
    assert shared_tokens(trace, 1, 2) == 512


# sessions


def test_a_turns_prompt_begins_with_the_turn_before_and_its_answer(tmp_path: Path) -> None:
    trace = read(tmp_path, f"{TALK}\n0,100,60,a,0\n5,200,40,a,1\n7,90,10,b,0\n9,300,10,a,2\n")
    assert trace.workload.prefixes is not None
    assert trace.workload.prefixes.block_tokens == 16
    assert shared_tokens(trace, 0, 1) == 160
    assert shared_tokens(trace, 1, 3) == 240
    assert shared_tokens(trace, 0, 2) == 0
    assert trace.workload.sessions is not None
    assert trace.workload.sessions.session.tolist() == [0, 0, 1, 0]
    assert waits(trace) == [[], [], [], []]  # nothing says how long its user thought


def test_a_turn_too_short_for_what_came_before_starts_over_with_its_system_prompt(tmp_path: Path) -> None:
    rows = "0,100,60,a,0,x,48\n5,150,40,a,1,x,48\n6,200,1,a,2,x,48\n7,50,1,b,0,x,48\n8,50,1,c,0,,\n"
    trace = read(tmp_path, f"{TALK},system,system_tokens\n{rows}")
    assert shared_tokens(trace, 0, 1) == 48
    assert shared_tokens(trace, 1, 2) == 176
    assert shared_tokens(trace, 0, 3) == 48
    assert shared_tokens(trace, 0, 4) == 0


def test_a_turn_with_a_time_to_think_waits_for_the_one_before(tmp_path: Path) -> None:
    trace = read(tmp_path, f"{TALK},think_s\n0,10,1,a,0,\n5,20,1,a,1,2.5\n6,30,1,a,2,\n7,40,1,,,\n")
    assert waits(trace) == [[], [0], [], []]
    sessions = trace.workload.sessions
    assert sessions is not None
    assert sessions.think_s.tolist() == [0, 2.5, 0, 0]
    assert sessions.session.tolist() == [0, 0, 0, -1]


def test_the_column_after_lets_turns_run_side_by_side(tmp_path: Path) -> None:
    rows = "0,16,16,a,0,,\n1,40,8,a,1,0,1\n1,40,8,a,2,0,1\n2,80,1,a,3,1 2,0.5\n"
    trace = read(tmp_path, f"{TALK},after,think_s\n{rows}")
    assert waits(trace) == [[], [0], [0], [1, 2]]
    assert shared_tokens(trace, 0, 1) == shared_tokens(trace, 0, 2) == shared_tokens(trace, 1, 2) == 32
    assert shared_tokens(trace, 1, 3) == 48


def test_turns_of_a_history_wait_for_the_answer_that_had_ended_last(tmp_path: Path) -> None:
    # Answers end at 2, 12 and 9 s; the third request overlaps the second, the last waits for the second.
    rows = "0,10,11,a,1,0.1,w\n5,40,11,a,2,0.5,w\n6,40,11,a,1,0.2,w\n15,80,1,a,1,,w\n16,80,1,b,1,,w\n"
    head = "arrival_s,prompt_tokens,output_tokens,session,ttft_s,tpot_s,worker,outcome"
    trace = read(tmp_path, f"{head}\n" + "".join(f"{row},finished\n" for row in rows.split()))
    assert trace.format == "history"
    assert waits(trace) == [[], [0], [0], [1], []]
    sessions = trace.workload.sessions
    assert sessions is not None
    assert sessions.think_s.tolist() == pytest.approx([0, 3, 4, 3, 0])


# Weka

AGENTS = {
    # session, agent, turn, parent_agent, parent_turn, t_s, think_s, api_s, input, output, hash_ids
    (0, 0, 0, -1, -1, 0.0, 0.0, 5.0, 130, 10): [0, 1],
    (0, 1, 0, 0, 1, 8.0, 0.0, 4.0, 70, 10): [2],
    (0, 1, 1, 0, 1, 14.0, 2.0, 6.0, 140, 10): [2, 3],
    (0, 2, 0, 0, 1, 9.0, 0.0, 1.0, 65, 10): [4],
    (0, 0, 1, -1, -1, 11.0, 6.0, 5.0, 200, 10): [0, 1, 5],
    (0, 0, 2, -1, -1, 20.0, 4.0, None, 260, 10): [0, 1, 5, 6],
    (1, 0, 0, -1, -1, 0.0, 0.0, 1.0, 64, 10): [0],
    (1, 0, 1, -1, -1, 3.0, None, 1.0, 128, 10): [0, 1],
}


def agents(path: Path, **changed: list[object]) -> Path:
    names = ("session", "agent", "turn", "parent_agent", "parent_turn", "t_s", "think_s", "api_s")
    rows = [
        dict(zip((*names, "input_tokens", "output_tokens"), key, strict=True)) | {"hash_ids": ids}
        for key, ids in AGENTS.items()
    ]
    pl.DataFrame(rows).with_columns(
        **{name: pl.Series(values) for name, values in changed.items()}
    ).write_parquet(path)
    return path


def test_a_parent_waits_for_its_sub_agents_and_recorded_times_agree(tmp_path: Path) -> None:
    trace = read_trace(agents(tmp_path / "t.parquet"))
    assert trace.format == "weka"
    assert "without a common clock" in trace.warnings[0]
    load = trace.workload
    # Sub-agent 1 ends at 20 s: the parent's second turn, recorded at 11 s, moves there, its third 9 s too.
    assert load.arrival_s.tolist() == [0, 0, 3, 8, 9, 14, 20, 29]
    assert load.prompt_tokens.tolist() == [130, 64, 128, 70, 65, 140, 200, 260]
    assert waits(trace) == [[], [], [1], [0], [0], [3], [0, 5, 4], [6]]
    assert load.sessions is not None
    assert load.sessions.think_s.tolist() == [0, 0, 2, 3, 4, 2, 0, 4]
    assert load.sessions.session.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert shared_tokens(trace, 0, 1) == 0  # equal ids of two sessions
    assert shared_tokens(trace, 0, 6) == 128
    assert shared_tokens(trace, 6, 7) == 192


def test_think_times_after_an_answer_of_unknown_length_are_not_counted_twice(tmp_path: Path) -> None:
    # As recorded: after an answer without `api_s`, `think_s` counts from the last end that was known, 5 s.
    path, n = tmp_path / "t.parquet", 5
    rows = {"session": [0] * n, "agent": [0] * n, "turn": list(range(n)), "t_s": [0.0, 8, 18, 28, 40]}
    rows |= {"parent_agent": [-1] * n, "parent_turn": [-1] * n, "think_s": [0.0, 3, 13, 23, 7]}
    rows |= {"api_s": [5.0, None, None, 5, 1], "input_tokens": [64] * n, "output_tokens": [9] * n}
    pl.DataFrame(rows | {"hash_ids": [[k] for k in range(n)]}).write_parquet(path)
    sessions = read_trace(path).workload.sessions
    assert sessions is not None
    assert sessions.think_s.tolist() == [0, 3, 10, 10, 7]


# what contradicts itself


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (mooncake((0, 100, 1, [1, 2])), "2 ids, expected 0 to 1 blocks of 512 for 100 prompt tokens"),
        (mooncake((0, 2048, 1, [1, 2])), "row 1: hash_ids: 2 ids, expected 4 blocks of 512"),
        (mooncake((0, 1024, 1, [1, 2]), (1, 1024, 1, [3, 2])), "row 2: hash_ids: the id at place 2 follows"),
        (mooncake((0, 1024, 1, [1, 1])), "row 1: hash_ids: the id at place 2 follows another"),
        (mooncake((0, 600, 1, [-1, 2])), "row 1: hash_ids: '[-1, 2]', expected a list of whole numbers"),
        (mooncake((0, 600, 1, [0, 1])).replace("[0, 1]", '"x"'), "row 1: hash_ids: 'x', expected a list"),
        (f"{TALK}\n0,9,1,a,0\n5,9,1,a,0\n", "row 2: turn: 0, which session 'a' has already"),
        (f"{TALK}\n0,9,1,a,1\n5,9,1,a,0\n", "row 1: turn: 1 of session 'a' was sent 5 s before turn 0"),
        (f"{TALK}\n0,9,1,a,-1\n", "row 1: turn: '-1', expected a whole number, at least 0"),
        (f"{TALK}\n0,9,1,a,\n1,9,1,b,0\n", "row 1: turn: no value"),
        (f"{TALK},think_s\n0,9,1,a,0,-1\n", "row 1: think_s: '-1', expected seconds, not negative"),
        (f"{TALK},after\n0,9,1,a,0,1\n1,9,1,a,1,\n", "row 1: after: 1, expected an earlier turn"),
        (f"{TALK},after\n0,9,1,a,0,\n1,9,1,b,1,0\n", "row 2: after: 0, expected an earlier turn"),
        (f"{TALK},system\n0,9,1,a,0,s\n", "system: expected system_tokens too"),
        (f"{TALK},system,system_tokens\n0,9,1,a,0,s,10\n", "system_tokens: 10, expected at most the 9"),
        (f"{TALK},system,system_tokens\n0,9,1,a,0,s,9\n0,9,1,b,0,s,8\n", "system_tokens: 8, 's' had 9 above"),
        (f"{TALK},hash_ids\n0,16,1,a,0,1\n", "hash_ids: expected block_tokens too"),
        (f"{TALK},hash_ids,block_tokens\n0,24,1,a,0,1,24\n", "block_tokens: 24, expected a multiple of 16"),
        (f"{TALK},hash_ids,block_tokens\n0,16,1,a,0,1,16\n1,32,1,b,0,1,32\n", "row 2: block_tokens: 32"),
        (f"{TALK},hash_ids,block_tokens\n0,16,15,a,0,1 2,16\n", "1 blocks of 16 for 16 prompt tokens and 15"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused_in_one_line_that_names_it(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(BadInput) as refused:
        read(tmp_path, text)
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path / "trace"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hash_ids": [[0], [2], [2, 3], [4], [0, 1, 5], [0, 1, 5, 6], [0], [0, 1]]}, "1 ids, expected 2 bl"),
        ({"think_s": [0.0, 0.0, -2.0, 0.0, 6.0, 4.0, 0.0, None]}, "think_s: '-2.0', expected seconds"),
        ({"turn": [0, 0, 1, 0, 0, 2, 0, 1]}, "row 5: turn: 0, which agent 0 of session 0 has already"),
        ({"t_s": [0.0, 8.0, 14.0, 9.0, 21.0, 20.0, 0.0, 3.0]}, "row 6: turn: 2 was sent 1 s before turn 1"),
        ({"parent_agent": [-1, 2, 2, 1, -1, -1, -1, -1]}, "sub-agents that wait for each other"),
    ],
)  # fmt: skip
def test_agents_that_contradict_themselves_are_refused(
    tmp_path: Path, changed: dict[str, list[object]], said: str
) -> None:
    path = agents(tmp_path / "t.parquet", **changed)
    with pytest.raises(BadInput) as refused:
        read_trace(path)
    assert said in str(refused.value)


# written and read again


def identical(one: Workload, other: Workload) -> bool:
    assert one.prefixes is not None
    assert other.prefixes is not None
    same = np.array_equal(one.prefixes.offsets, other.prefixes.offsets)
    same &= np.array_equal(one.prefixes.ids, other.prefixes.ids)
    if one.sessions is None or other.sessions is None:
        return bool(same and one.sessions is other.sessions)
    names = ("session", "offsets", "before", "think_s")
    return bool(same) and all(
        np.array_equal(getattr(one.sessions, name), getattr(other.sessions, name)) for name in names
    )


@st.composite
def conversations(draw: st.DrawFn) -> Trace:
    """Sessions of a few turns, some side by side, some requests of none; prefixes from lengths."""
    turns = [0, *draw(st.lists(st.integers(-1, 3), max_size=12))]
    n = len(turns)
    gaps_s = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    arrival_s = np.cumsum(gaps_s).astype(float) - gaps_s[0]
    lengths = st.lists(st.integers(1, 200), min_size=n, max_size=n)
    prompt, output = np.array(draw(lengths)), np.array(draw(lengths))
    known = [s for s in dict.fromkeys(turns) if s >= 0]
    session = np.array([known.index(s) if s >= 0 else -1 for s in turns])
    before: list[list[int]] = [[] for _ in turns]
    wide = draw(st.booleans())
    parent = np.full(n, -1, np.int64)
    for r in range(n):
        earlier = [q for q in range(r) if session[q] == session[r] >= 0]
        if earlier:
            parent[r] = earlier[-1]
            if draw(st.booleans()):
                before[r] = (
                    draw(st.lists(st.sampled_from(earlier), min_size=1, unique=True))
                    if wide
                    else earlier[-1:]
                )
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in before])])
    think_s = np.array([float(draw(st.integers(0, 9))) if each else 0.0 for each in before])
    systems = None
    if draw(st.booleans()):
        tokens = np.array([int(prompt.min()) // 2])
        systems = SystemPrompts(
            ("s",), tokens, np.array(draw(st.lists(st.integers(-1, 0), min_size=n, max_size=n)))
        )
    load = Workload(
        arrival_s, prompt, output,
        prefixes=follow_lengths(prompt, output, parent, systems),
        sessions=Sessions(session, offsets, np.array([*chain(*before)], np.int64), think_s),
    )  # fmt: skip
    return Trace("made", "plain", load, systems=systems, from_lengths=True)


@given(conversations(), st.sampled_from(["csv", "jsonl", "parquet"]))
def test_a_plain_trace_keeps_what_its_requests_share_and_wait_for(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("written") / f"t.{suffix}"
    write_trace(trace, path)
    back = read_trace(path)
    assert back.warnings == []
    assert waits(back) == waits(trace)
    assert back.workload.sessions is not None
    assert trace.workload.sessions is not None
    assert np.array_equal(back.workload.sessions.think_s, trace.workload.sessions.think_s)
    n = len(trace)
    for one in range(n):
        for other in range(one):
            assert shared_tokens(back, one, other) == shared_tokens(trace, one, other)
    again = path.with_name(f"again.{suffix}")
    write_trace(back, again)
    assert identical(read_trace(again).workload, back.workload)


def test_mooncake_keeps_shared_blocks_of_512_also_from_smaller_ones(tmp_path: Path) -> None:
    text = mooncake((0, 1100, 1000, [0, 1, 2]), (9, 3000, 5, [0, 1, 3, 4, 5, 6]), (9, 700, 5, [0, 9]))
    trace = read(tmp_path, text)
    small = trace.workload.prefixes
    assert small is not None
    pieces = (small.ids[:, None] * 8 + np.arange(8)).ravel()
    cut = replace(trace, workload=replace(trace.workload, prefixes=Prefixes(64, small.offsets * 8, pieces)))
    for each in (trace, cut):
        path = tmp_path / "out.jsonl"
        write_trace(each, path, "mooncake", overwrite=True)
        assert lists(read_trace(path)) == lists(trace)
        assert pl.read_ndjson(path)["hash_ids"].list.len().to_list() == [3, 6, 2]


def test_traces_read_together_share_nothing_across_and_keep_their_sessions(tmp_path: Path) -> None:
    one = read(tmp_path, mooncake((0, 1100, 1, [0, 1, 2]), (2000, 1100, 1, [0, 1, 3])))
    other = read(tmp_path, f"{TALK},think_s\n0,100,60,a,0,\n1,200,40,a,1,2.5\n")
    none = read(tmp_path, "arrival_s,prompt_tokens,output_tokens\n1,10,1\n")
    both = merged([one, other, none])
    assert both.workload.arrival_s.tolist() == [0, 0, 0, 1, 2]
    assert both.workload.prefixes is not None
    assert both.workload.prefixes.block_tokens == 16
    assert shared_tokens(both, 0, 4) == 1024
    assert shared_tokens(both, 1, 3) == 160
    assert shared_tokens(both, 0, 1) == shared_tokens(both, 0, 2) == 0
    assert waits(both) == [[], [], [], [1], []]


def test_requests_left_out_are_waited_for_no_more(tmp_path: Path) -> None:
    trace = read(tmp_path, f"{TALK},think_s\n0,100,60,a,0,\n5,200,40,a,1,2.5\n9,300,10,a,2,1\n")
    part = replace(trace, workload=trace.workload.window(4.0, 10.0))
    assert waits(part) == [[], [0]]
    assert shared_tokens(part, 0, 1) == 240
    kept = replace(trace, workload=trace.workload.take(np.array([True, False, True])))
    assert waits(kept) == [[], []]


# public traces


def test_the_public_mooncake_trace_can_hit_what_its_ids_allow(bench_data: Path) -> None:
    """By another way: a set of all that stood before, prompts alone."""
    path = bench_data / "mooncake" / "synthetic_trace.jsonl"
    seen: set[int] = set()
    hits = tokens = 0
    for line in path.read_text().splitlines():
        row = json.loads(line)
        blocks = row["hash_ids"][: (row["input_length"] - 1) // 512]
        hits += 512 * next((k for k, each in enumerate(blocks) if each not in seen), len(blocks))
        tokens += row["input_length"]
        seen.update(row["hash_ids"][: row["input_length"] // 512])
    load = read_trace(path).workload
    assert load.prefixes is not None
    known = np.zeros(load.prefixes.ids.max() + 1, bool)
    found = 0
    for r, prompt in enumerate(load.prompt_tokens.tolist()):
        ids = load.prefixes.of(r)
        usable = known[ids[: (prompt - 1) // 512]]
        found += 512 * (len(usable) if usable.all() else int(np.argmin(usable)))
        known[ids] = True
    assert hits / tokens == pytest.approx(0.65, abs=0.005)
    assert found / tokens == pytest.approx(hits / tokens, abs=0.001)  # answers add a little


def test_the_public_weka_sessions_read_as_published(bench_data: Path) -> None:
    trace = read_trace(bench_data / "weka" / "requests.parquet")
    load = trace.workload
    assert len(load) == 9022 - trace.empty_outputs
    assert load.sessions is not None
    assert load.prefixes is not None
    assert int(load.sessions.session.max()) + 1 == 120
    counts = np.diff(load.sessions.offsets)
    assert int((counts == 0).sum()) == 120  # all but the first of each session wait for something
    assert np.median(load.sessions.think_s[counts > 0]) == pytest.approx(10, abs=1)
    assert (np.diff(load.prefixes.offsets) * 64 <= load.prompt_tokens + load.output_tokens).all()
