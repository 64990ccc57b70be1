"""A replay and the lengths of its answers: to whom they are named."""

from types import SimpleNamespace

import pytest

from dataplane.live.engine_api.link import ENDS_AT
from dataplane.live.ledger.request import expected_tokens
from tokenfleet.compare.replay import Endpoint, _body


@pytest.mark.parametrize(("is_emulated", "expected"), [(True, 77), (False, 30)])
def test_placement_predicts_the_lengths_of_emulated_answers_and_is_told_others(is_emulated, expected):
    endpoint = Endpoint("http://any", "any", context_limit_tokens=4096, is_emulated=is_emulated)
    body = _body(endpoint, [7] * 100, 30)
    asked = {name: body.get(name) for name in ("max_tokens", "ignore_eos")}
    request = SimpleNamespace(prompt_token_ids=body["prompt"], sampling_params=SimpleNamespace(**asked))
    assert expected_tokens(request, lambda prompt, generated: 77) == expected
    ends_at = body.get("vllm_xargs", {}).get(ENDS_AT)
    assert (body["max_tokens"], ends_at) == ((3996, 130) if is_emulated else (30, None))


def test_an_answer_beyond_the_context_that_the_endpoint_names_keeps_its_length():
    assert _body(Endpoint("http://any", "any", is_emulated=True), [7] * 100, 30)["max_tokens"] == 30
