from async_grpo.telemetry.schema import METRICS
from async_grpo.telemetry.trackers import NO_CHARTS, as_charts


def test_every_metric_has_a_chart_in_a_group_but_for_the_axis():
    names = [metric.name for metric in METRICS] + [
        "fate_failed",
        "discarded_deadline",
        "lag_1_tokens",
    ]
    charts = as_charts(dict.fromkeys(names, 1.0))
    grouped = dict(chart.split("/")[::-1] for chart in charts)
    assert set(names) - set(grouped) == set(NO_CHARTS)
    assert {grouped[name] for name in ("avg_reward", "avg_max_reward_in_group")} == {"reward"}
    assert {grouped[name] for name in ("fate_failed", "discarded_deadline")} == {"ledger"}
    assert {grouped[name] for name in ("lag_1_tokens", "max_lag")} == {"lag"}
    assert {grouped[name] for name in ("seconds_waiting", "tokens_per_second")} == {"speed"}
    assert {grouped[name] for name in ("loss", "kl", "entropy", "grad_norm")} == {"update"}
