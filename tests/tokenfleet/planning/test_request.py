"""A plan's options: each is in every face, with the same bounds, and reads back as it was written."""

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from controlplane.errors import BadInput
from controlplane.types import EngineMode, Slo
from tokenfleet.cli.flags import takes_flags
from tokenfleet.planning.request import Option, PlanRequest, command_line, options
from tokenfleet.service.forms import PlanOrder, command_of, in_field_names, read_order

SLO = Slo(0.4, 0.03)
TEXTS = {
    "classes": ("chat:ttft=1s,tpot=30ms", "batch:deadline=6h", "b.c-1:ttft=2s,tpot=1s,attainment=0.5"),
    "class_of": ("batch=tenant:acme", "chat=key:k 1", "b.c-1=priority:high"),
    "speculate": ("off", "0.8/0.6", "0.7@1ms"),
    "strictness": ("strict", "theta=1", "gamma=0.9,tolerance=2"),
    "host_kv": ("off", "64GiB", "1.5TiB@25GB/s"),
    "window": ("10m..20m", "..90"),
}
ORDER = {"trace": {"sample": True}, "slo": {"ttft_s": 0.4, "tpot_s": 0.03}}

ONE_MORE = """
import dataclasses, json, sys, tempfile
from dataplane.http.keys import KeyRing
from pathlib import Path
from typing import Annotated
from pydantic import Field
from tokenfleet.planning import request

@dataclasses.dataclass(frozen=True)
class Wider(request.PlanRequest):
    zone_count: Annotated[int, Field(ge=1, le=9), request.About("zones", "zones to spread over")] = 1

request.PlanRequest = Wider  # as if the field stood there

from controlplane.types import Slo
from tokenfleet.cli.flags import with_config
from tokenfleet.cli.main import VERBS, command_of, main
from tokenfleet.service.app import plan_app
from tokenfleet.service.forms import PlanOrder
from tokenfleet.service.plan_service import PlanService, ServiceLimits
from tokenfleet.service.routes import plan_extension
from tokenfleet.whatifs.axes import AXES, changed

for verb in ("plan", "whatif"):
    main([verb, "--help-all"])
folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
(folder / "flags.yaml").write_text("zone-count: 3")
cell = changed(Wider(Slo(0.4, 0.03)), {"zone-count": "3"})
service = PlanService(folder, ServiceLimits())
order = {"trace": {"sample": True}, "slo": {"ttft_s": 0.4, "tpot_s": 0.03}, "zone_count": 3}
app = plan_app(KeyRing(()), [plan_extension(service)])
print("ANSWER" + json.dumps({
    "config": with_config(command_of(VERBS["plan"]), str(folder / "flags.yaml"), []),
    "axis": AXES["zone-count"].name,
    "command": request.command_line(cell, ["--trace", "x"]),
    "openapi": app.openapi()["components"]["schemas"]["PlanOrder"],
    "ordered": PlanOrder.model_validate(order).request().zone_count,
    "catalogue": service.catalogue()["options"],
}))
"""


def test_an_option_that_is_added_is_in_every_face(tmp_path: Path) -> None:
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ONE_MORE, str(tmp_path)], capture_output=True, text=True, env=environment
    )
    help_text, _, answer = done.stdout.partition("ANSWER")
    assert done.returncode == 0, done.stderr
    assert help_text.count("--zone-count") == help_text.count("zones to spread over") == 2
    said = json.loads(answer)
    assert said["config"] == ["--zone-count", "3"]
    assert said["axis"] == "zones"
    assert said["command"].endswith("--slo ttft=400ms,tpot=30ms --zone-count 3")
    field = said["openapi"]["properties"]["zone_count"]
    assert (field["minimum"], field["maximum"], field["default"]) == (1, 9, 1)
    assert said["ordered"] == 3
    (listed,) = [option for option in said["catalogue"] if option["name"] == "zone_count"]
    assert (listed["flag"], listed["kind"], listed["default"]) == ("zone-count", "count", 1)
    assert listed["bounds"] == {"ge": 1, "le": 9}
    assert listed["help"] == "zones to spread over"


def values(option: Option) -> st.SearchStrategy[Any]:
    """Values that an option can be."""
    low = option.bounds.get("ge", option.bounds.get("gt", 0))
    high = min(option.bounds.get("le", math.inf), option.bounds.get("lt", math.inf), 1e9)
    excluded = {"exclude_min": "gt" in option.bounds, "exclude_max": "lt" in option.bounds}
    numbers = st.floats(low, high, **excluded).filter(lambda x: x == 0 or x > 1e-9)  # type: ignore[call-overload]
    seconds = st.floats(1e-6, 1e6)
    words = st.text("abc xyz'-.1", min_size=1, max_size=9).filter(lambda text: not text.startswith("-"))
    one: dict[str, st.SearchStrategy[Any]] = {
        "slo": st.builds(Slo, seconds, seconds),
        "number": numbers,
        "duration": numbers,
        "count": st.integers(math.ceil(low), int(high) - ("lt" in option.bounds)),
        "switch": st.booleans(),
        "choice": st.sampled_from(option.choices),
        "file": st.builds(Path, words),
        "word": st.sampled_from(TEXTS[option.field]) if option.codec else words,
    }
    found = one[option.kind].map(EngineMode) if option.item is EngineMode else one[option.kind]
    return (
        st.lists(found, max_size=3, unique=option.field == "classes").map(tuple) if option.is_list else found
    )


def requests() -> st.SearchStrategy[PlanRequest]:
    optional = {option.field: values(option) for option in options() if not option.is_required}
    slo = next(values(option) for option in options() if option.field == "slo")
    return st.fixed_dictionaries({"slo": slo}, optional=optional).map(lambda made: PlanRequest(**made))


def read_flags() -> Any:
    """A command that only makes a request of its flags."""

    @takes_flags()
    def verb(*, trace: Annotated[str, typer.Option()], request: PlanRequest) -> int:
        made.append(request)
        return 0

    made: list[PlanRequest] = []
    app = typer.Typer(add_completion=False)
    app.command()(verb)
    command = typer.main.get_command(app)

    def read(words: list[str]) -> PlanRequest:
        command.main(args=words, standalone_mode=False)
        return made.pop()

    return read


READ = read_flags()


@given(requests())
def test_a_printed_command_asks_for_the_very_same(request: PlanRequest) -> None:
    tokenfleet, plan, *words = shlex.split(command_line(request, ["--trace", "x"]))
    assert (tokenfleet, plan) == ("tokenfleet", "plan")
    assert READ(words) == request


@pytest.mark.parametrize(
    "option", [o for o in options() if o.bounds and not o.is_list], ids=lambda o: o.field
)
def test_flags_and_http_have_the_same_bounds(option: Option) -> None:
    step = 1 if option.kind == "count" else 1e-6
    for name, limit in option.bounds.items():
        beyond = limit if name in ("gt", "lt") else limit - step if name == "ge" else limit + step
        beyond = int(beyond) if option.kind == "count" else beyond
        with pytest.raises(BadInput, match=rf"^--{option.flag}: must be .*, got "):
            PlanRequest(SLO, **{option.field: beyond})
        with pytest.raises(ValidationError, match=option.field):
            PlanOrder.model_validate(ORDER | {option.field: beyond})


def test_an_order_is_the_request_of_its_options(tmp_path: Path) -> None:
    more = {"gpu": ["h100"], "spot": True, "policy": "jsq", "engine": "split", "cold_start_s": 90.0}
    order = PlanOrder.model_validate(ORDER | more | {"profiles": ["a: 1", "b: 2"], "prices": "c: 3"})
    asked = order.request(tmp_path)
    assert (asked.slo, asked.gpu, asked.spot, asked.policy) == (SLO, ("h100",), True, "jsq")
    assert (asked.engine, asked.cold_start_s) == (EngineMode.SPLIT, 90.0)
    assert [order.files(tmp_path)[path] for path in (*asked.profiles, asked.prices)] == [
        "a: 1",
        "b: 2",
        "c: 3",
    ]


def test_an_order_of_classes_needs_no_plain_targets_and_one_of_neither_is_refused() -> None:
    order = {"trace": {"sample": True}, "classes": ["batch:deadline=6h", "chat:ttft=1s,tpot=30ms"]}
    asked = PlanOrder.model_validate(order).request()
    assert (asked.slo, asked.has_only_classes) == (Slo(1.0, 0.03), True)
    assert [one.name for one in asked.slo_classes] == ["batch", "chat"]
    with pytest.raises(BadInput, match=r"^slo: missing"):
        PlanOrder.model_validate({"trace": {"sample": True}}).request()


def test_an_order_kept_by_an_older_version_is_read_or_refused_in_one_line() -> None:
    older = ORDER | {"model": "m", "rate_scale": 2.0, "seed": 3, "reclaims_per_h": None}
    assert read_order(older).request() == PlanRequest(SLO, model="m", rate_scale=2.0, seed=3)
    words = "tokenfleet plan --trace day.csv --slo ttft=400ms,tpot=30ms --model m --rate-scale 2.0 --seed 3"
    assert command_of(older | {"trace": {"upload": "a1"}}, "day.csv") == words
    with pytest.raises(BadInput, match=r"^the order as it was kept: colour: [^\n]*$"):
        read_order(older | {"colour": "red"})
    assert command_of({"seed": 1}, "day.csv") is None


def test_a_refusal_over_http_names_fields() -> None:
    refusal = "--reclaims-per-h: needs --cold-start; --profile and --rate-scale-x stay"
    assert in_field_names(refusal) == "reclaims_per_h: needs cold_start_s; profiles and --rate-scale-x stay"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"profiles": (Path("a"),), "tp": (1,)}, "--profile: says which workers"),
        ({"reclaims_per_h": 0.1, "cold_start_s": 60.0}, "give --spot too"),
        ({"reclaims_per_h": 0.1, "spot": True}, "needs --cold-start"),
    ],
)
def test_options_without_meaning_beside_the_others_are_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        PlanRequest(SLO, **more).consistent()
