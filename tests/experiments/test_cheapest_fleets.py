"""Plans whose cheapest fleet was once missed: no cheaper one holds, by trying all."""

import pytest

from experiments.planning.cheapest import CASES, compared

STEPPED_OVER = CASES["development"][1]  # of H100s 2, 3 and 5 fail, 4 and 6 hold: 5 by one request
HURT = CASES["judged"][0]  # an L40S less makes a mix that fails one that holds


@pytest.mark.parametrize(("case", "fleet"), [(STEPPED_OVER, "4 x h100-sxm TP1"), (HURT, "5 x h100-sxm TP1")])
def test_no_cheaper_fleet_holds(case, fleet):
    row = compared(case)
    assert row["plan"] == fleet
    assert row["tried"] > 50
    assert row["cheaper"] == 0.0
