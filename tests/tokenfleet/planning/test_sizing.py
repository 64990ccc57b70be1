"""The smallest count that passes, against looking at every count."""

from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.planning.sizing import smallest


@given(st.integers(1, 300), st.integers(1, 300), st.integers(-5, 400), st.integers(0, 400))
def test_it_finds_what_looking_at_every_count_finds(low: int, cap: int, guess: int, first: int) -> None:
    looked = [n for n in range(low, cap + 1) if n >= first]
    assert smallest(lambda n: n >= first, low, guess, cap) == (looked[0] if looked else None)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_a_guess_wrong_by_d_costs_about_two_log_d_trials(guess: int, first: int) -> None:
    tried: list[int] = []

    def passes(n: int) -> bool:
        tried.append(n)
        return n >= first

    assert smallest(passes, 1, guess, 10_000) == first
    assert len(tried) == len(set(tried))
    assert len(tried) <= 2 * abs(guess - first).bit_length() + 2
