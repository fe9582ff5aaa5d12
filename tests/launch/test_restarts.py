from hypothesis import given
from hypothesis import strategies as st

from async_grpo.launch.supervised_worker import FIRST_PAUSE_S, LONGEST_PAUSE_S, RestartBudget

gaps = st.lists(st.floats(0, 60, allow_nan=False), min_size=1, max_size=60)


@given(gaps=gaps, max_restarts=st.integers(0, 6), window_s=st.floats(1, 200))
def test_no_window_holds_more_restarts_than_allowed(gaps, max_restarts, window_s):
    budget, now, granted = RestartBudget(max_restarts, window_s=window_s), 0.0, []
    for gap in gaps:
        now += gap
        recent = [at for at in granted if now - at < window_s]
        pause_s = budget.next_pause_s(now)
        assert (pause_s is None) == (len(recent) >= max_restarts)
        if pause_s is not None:
            assert pause_s == min(FIRST_PAUSE_S * 2 ** len(recent), LONGEST_PAUSE_S)
            granted.append(now)
            assert budget.num_used == len(recent) + 1


def test_pauses_have_a_bound():
    budget = RestartBudget(10_000, window_s=1e9)
    pauses = [budget.next_pause_s(float(second)) for second in range(10_000)]
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert max(pauses) == LONGEST_PAUSE_S
