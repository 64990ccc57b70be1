"""Prices and profiles of the user's own: what `data update` keeps, and how plans use it."""

import http.server
import json
import threading
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

import tokenfleet as tf
from controlplane.errors import BadInput
from tokenfleet.cli.main import main
from tokenfleet.profiles import library
from tokenfleet.profiles.library import find_profiles, library_folder
from tokenfleet.profiles.own import own_folder
from tokenfleet.profiles.prices import read_prices
from tokenfleet.profiles.updates import kept, update
from tokenfleet.service.plan_service import known_gpus

TODAY = date(2026, 11, 25)
PRICES = """schema: tokenfleet.prices/1
prices:
- {gpu: h100-sxm, on_demand: 1.25, date: 2026-11-01, source: our contract}
- {gpu: a100-sxm, on_demand: 0.75, date: 2026-10-02, source: our contract}
"""
H100 = (library_folder() / "h100-sxm" / "llama-3.1-8b_tp1.yaml").read_text()


@pytest.fixture(autouse=True)
def a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of the test's own; profiles are read again in it, and after it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    library._shelves.cache_clear()
    yield tmp_path / "home"
    library._shelves.cache_clear()


def source(tmp_path: Path, text: str) -> str:
    (tmp_path / "given.yaml").write_text(text)
    return str(tmp_path / "given.yaml")


def test_prices_of_ones_own_replace_those_that_ship_until_they_are_forgotten(tmp_path: Path) -> None:
    before = read_prices()
    update(source(tmp_path, PRICES), TODAY)
    ours = read_prices()
    price = ours.usd_per_gpu_h("h100")
    assert price is not None
    assert (price.usd, price.date, ours.gpus) == (1.25, date(2026, 11, 1), ["a100-sxm", "h100-sxm"])
    assert main(["data", "forget"]) == 0
    assert read_prices() == before


def test_a_profile_of_ones_own_comes_before_the_shipped_one_and_hides_no_other(tmp_path: Path) -> None:
    shipped = find_profiles("llama-3.1-8b")
    update(source(tmp_path, H100.replace("per_request_s: 0.011", "per_request_s: 0.5")), TODAY)
    library._shelves.cache_clear()
    ours = find_profiles("llama-3.1-8b")
    assert [(p.gpu, p.tp_degree) for p in ours] == [(p.gpu, p.tp_degree) for p in shipped]
    changed = [(p.gpu, p.tp_degree) for p, was in zip(ours, shipped, strict=True) if p != was]
    assert changed == [("h100-sxm", 1)]


def test_fleets_are_priced_by_them(tmp_path: Path) -> None:
    assert read_prices().whose == ""
    update(source(tmp_path, PRICES), TODAY)
    assert read_prices().whose == "your prices.yaml: "
    assert next(gpu for gpu in known_gpus() if gpu["name"] == "h100-sxm")["on_demand"]["is_own"]
    assert tf.Fleet.parse("2x h100 TP1", model="llama-3.1-8b").usd_per_hour == 2.5


def test_several_documents_are_kept_together_and_shown_with_their_dates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    update(source(tmp_path, f"{PRICES}---\n{H100}"), TODAY)
    assert [(one.name, one.dated) for one in kept()] == [
        ("prices.yaml", "2026-11-01"),
        (
            "profiles/h100-sxm/llama-3.1-8b_tp1.yaml",
            find_profiles("llama-3.1-8b", ["h100"], [1])[0].source.date,
        ),
    ]
    assert {one.updated for one in kept()} == {"2026-11-25"}
    assert main(["data", "show"]) == 0
    assert "2026-11-01" in capsys.readouterr().out


def test_a_price_of_a_gpu_that_no_profile_is_of_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = source(tmp_path, PRICES.replace("a100-sxm", "a10O-sxm"))
    assert main(["data", "update", given]) == 0
    shown = capsys.readouterr().out
    assert "No profile is of 'a10o-sxm': no plan uses its price." in shown
    assert "h100" not in shown
    assert main(["data", "show", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus_without_profile"] == ["a10o-sxm"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty; expected prices or profiles"),
        ("prices: []", "expected `schema: tokenfleet.prices/1` or `schema: tokenfleet.profile/1`"),
        ("schema: tokenfleet.prices/1\nprices: []", "prices: none"),
        (PRICES.replace("1.25", "-1"), "on_demand"),
        (PRICES.replace("2026-11-01", "soon"), "date"),
        (f"{PRICES}---\n{PRICES}", "document 2: a second prices.yaml"),
        (f"{PRICES}---\n{H100.replace('base_s: 0.00671506', 'base_s: fast')}", "document 2: step.base_s"),
        ("schema: tokenfleet.plan/1", "expected `schema"),
    ],
)
def test_a_faulty_source_is_one_line_and_nothing_is_kept(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        update(source(tmp_path, text), TODAY)
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path / "given.yaml"))
    assert len(str(refused.value).splitlines()) == 1
    folder = own_folder()
    assert folder is not None
    assert not folder.exists()


def test_an_address_is_fetched_and_one_that_fails_keeps_what_was_there(tmp_path: Path) -> None:
    source(tmp_path, PRICES)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *told: object) -> None:
            super().__init__(*told, directory=str(tmp_path))  # type: ignore[arg-type]

        def log_message(self, *told: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        (one,) = update(f"{url}/given.yaml", TODAY)
        with pytest.raises(BadInput, match=r"none\.yaml: cannot be fetched: "):
            update(f"{url}/none.yaml", TODAY)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [(o.name, o.source) for o in kept()] == [("prices.yaml", f"{url}/given.yaml")]
    assert one.dated == "2026-11-01"
    with pytest.raises(BadInput, match="cannot be fetched"):
        update(f"{url}/given.yaml", TODAY)
    with pytest.raises(BadInput, match="expected a file, or an http"):
        update("ftp://prices/given.yaml", TODAY)
