"""Part A of the GPU day on CPU tensors: every part runs, and no control that needs a stream passes."""

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (requirements/live-cpu.txt)")

from late_cuda import Cuda  # noqa: E402

from experiments.gpu import order  # noqa: E402
from experiments.gpu.bench import Bench, bench_here  # noqa: E402
from experiments.gpu.day import CALLS, failed, run_call  # noqa: E402

CPU = Bench(torch.device("cpu"), is_quick=True)


@pytest.mark.parametrize("call", sorted(CALLS))
def test_every_part_of_a_call_runs_on_a_cpu(call, tmp_path):
    answer = run_call(CPU, call, tmp_path / "call.json")
    assert json.loads((tmp_path / "call.json").read_text()) == answer
    assert failed(answer) == []
    assert set(answer["parts"]) == set(CALLS[call])
    for part in answer["parts"].values():
        assert part["rows"]
        assert part["turns"]


def test_controls_of_order_are_not_applicable_without_a_stream():
    checks = order.measure(CPU).checks
    found = {name: one for name, one in checks.items() if name.startswith("control")}
    assert set(found.values()) == {"not applicable"}
    assert {one for name, one in checks.items() if name not in found} == {"passed"}


def test_controls_of_order_are_caught_where_the_engine_computes_late():
    cuda = Cuda()

    class Late:
        is_late = True

        def launch(self, work):
            cuda.launched.append(work)

        def finish(self):
            for work in cuda.launched:
                work()
            cuda.launched.clear()

    checks = order.measure(CPU, Late(), cuda).checks
    assert checks["rule 1: reads see the steps before"] == "passed"
    assert checks["rule 3: loads come after late writes"] == "passed"
    assert checks["control of rule 1 is caught"] == "passed"
    # The stub's own copies are done at once, so what waits for them cannot be caught there.
    assert checks["control of rule 2 is caught"] == checks["control of rule 3 is caught"] == "failed"


def test_a_part_that_raises_is_a_failed_check_and_the_others_still_run(monkeypatch, capsys, tmp_path):
    def broken(bench):
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setitem(CALLS, 9, {"broken": broken, "facts": CALLS[1]["facts"]})
    answer = run_call(bench_here(quick=True), 9, tmp_path / "call.json")
    assert failed(answer) == ["broken runs to its end"]
    assert answer["parts"]["facts"]["rows"][0]["torch"] == torch.__version__
    assert "illegal memory access" in capsys.readouterr().err
