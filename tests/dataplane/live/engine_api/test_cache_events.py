"""An engine's cache events: they name the same blocks as gateways do, and keep account of copies."""

import numpy as np
import pytest

from controlplane.placement.caches import chain
from dataplane.live.engine_api.cache_events import ROOT, CachedBlocks, tree

BLOCK = 16
TEXT = np.random.default_rng(0).integers(0, 32_000, 160).tolist()


def ids_of(tokens: list[int], root: int = ROOT) -> list[int]:
    ids = np.zeros(len(tokens) // BLOCK, np.int64)
    chain(np.array(tokens, np.int64), BLOCK, root, ids)
    return ids.tolist()


def stored(names: list[int], tokens: list[int], parent: int | None = None, **facts) -> dict:
    """vLLM's event as it arrives."""
    plain = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens}
    return plain | {"block_size": BLOCK, "lora_name": None, "extra_keys": None} | facts


def removed(*names: int) -> dict:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU"}


def told(change) -> tuple[set[int], set[int]]:
    more, fewer = change.ids()
    return set(more.tolist()), set(fewer.tolist())


def host(change) -> tuple[set[int], set[int]]:
    more, fewer = change.host_ids()
    return set(more.tolist()), set(fewer.tolist())


def test_blocks_are_named_as_gateways_name_them_whatever_events_they_came_in():
    cached = CachedBlocks(BLOCK)
    first = cached.take([stored([1, 2], TEXT[:32]), stored([3], TEXT[32:48], parent=2)])
    assert (first.number, told(first)) == (1, (set(ids_of(TEXT[:48])), set()))
    later = cached.take([stored([4, 5], TEXT[48:80], parent=3)])
    assert (later.number, told(later)) == (2, (set(ids_of(TEXT[:80])[3:]), set()))
    assert told(cached.all()) == (set(ids_of(TEXT[:80])), set())
    assert cached.all().is_all
    assert cached.all().number == 2


def test_what_is_in_host_memory_keeps_its_name_when_it_has_left_kv():
    cached, ids = CachedBlocks(BLOCK), ids_of(TEXT[:48])
    cached.take([stored([1, 2, 3], TEXT[:48])])
    copied = {"type": "BlockStored", "block_hashes": [1, 2, 9], "block_size": 0, "token_ids": []}
    change = cached.take([removed(2)], [copied])  # told in one step: copied, and evicted from KV
    assert (told(change), host(change)) == ((set(), {ids[1]}), ({ids[0], ids[1]}, set()))
    assert (told(cached.all()), host(cached.all())) == (({ids[0], ids[2]}, set()), ({ids[0], ids[1]}, set()))
    assert host(cached.take([], [removed(2)])) == (set(), {ids[1]})
    assert cached.take([], [removed(2)]) is None
    assert host(cached.take([], [{"type": "AllBlocksCleared"}])) == (set(), {ids[0]})
    assert host(cached.all()) == (set(), set())


@pytest.mark.parametrize(
    ("facts", "root"),
    [
        ({"extra_keys": [["mine"], None]}, tree("mine", None)),
        ({"extra_keys": [["poet"], ["poet"]], "lora_name": "poet"}, tree(None, "poet")),
        ({"extra_keys": [["poet", "mine"], ["poet"]], "lora_name": "poet"}, tree("mine", "poet")),
        ({"extra_keys": [None, None]}, ROOT),
    ],
)
def test_a_salt_and_an_adapter_make_the_tree(facts, root):
    cached = CachedBlocks(BLOCK)
    assert told(cached.take([stored([1, 2], TEXT[:32], **facts)]))[0] == set(ids_of(TEXT[:32], root))


def test_an_image_ends_what_is_known_and_what_follows_it_is_passed_over():
    cached = CachedBlocks(BLOCK)
    events = [stored([1, 2, 3], TEXT[:48], extra_keys=[None, [["image", 3]], None])]
    events += [stored([4], TEXT[48:64], parent=3), removed(4), removed(2)]
    assert told(cached.take(events)) == (set(ids_of(TEXT[:16])), set())
    embedded = CachedBlocks(BLOCK)
    assert embedded.take([stored([1], TEXT[:16], extra_keys=[[b"digest"]])]) is None


def test_a_block_cached_twice_is_there_until_both_are_gone():
    cached = CachedBlocks(BLOCK)
    cached.take([stored([1], TEXT[:16]), stored([1], TEXT[:16])])
    assert cached.take([removed(1)]) is None
    assert told(cached.take([removed(1)])) == (set(), set(ids_of(TEXT[:16])))
    assert cached.take([removed(1)]) is None


def test_what_goes_and_comes_back_in_one_step_has_not_changed():
    cached = CachedBlocks(BLOCK)
    cached.take([stored([1], TEXT[:16])])
    assert cached.take([removed(1), stored([1], TEXT[:16])]) is None
    assert cached.take([stored([2], TEXT[16:32], parent=1), removed(2)]) is None


def test_a_cleared_cache_is_told_as_all_there_is():
    cached = CachedBlocks(BLOCK)
    cached.take([stored([1], TEXT[:16])])
    change = cached.take([{"type": "AllBlocksCleared"}, stored([7], TEXT[16:32])])
    assert (change.is_all, change.number) == (True, 2)
    assert told(change) == (set(ids_of(TEXT[16:32])), set())


def test_changes_add_up_to_what_is_cached_over_random_lives():
    rng = np.random.default_rng(1)
    for _ in range(30):
        cached, known, copies = CachedBlocks(BLOCK), set[int](), dict[int, int]()
        names = [100 + b for b in range(10)]
        ids = dict(zip(names, ids_of(TEXT), strict=True))
        for _step in range(40):
            events = []
            for _event in range(int(rng.integers(0, 4))):
                there = sorted(copies, key=names.index)
                if rng.random() < 0.5 or not there:
                    n, parent = int(rng.integers(1, 4)), None
                    at = 0 if not there else int(rng.integers(0, len(there) + 1))
                    at = next((i for i in range(at, -1, -1) if i == 0 or names[i - 1] in copies), 0)
                    parent = names[at - 1] if at else None
                    new = names[at : at + n]
                    events.append(stored(new, TEXT[at * BLOCK : (at + len(new)) * BLOCK], parent=parent))
                    copies |= {name: copies.get(name, 0) + 1 for name in new}
                else:
                    name = there[int(rng.integers(0, len(there)))]
                    events.append(removed(name))
                    copies = {k: c - (k == name) for k, c in copies.items() if c - (k == name)}
            change = cached.take([e for e in events if e.get("block_hashes")])
            if change is not None:
                more, fewer = told(change)
                assert not more & known
                assert fewer <= known
                known = (known | more) - fewer
            assert known == {ids[name] for name in copies} == told(cached.all())[0]
