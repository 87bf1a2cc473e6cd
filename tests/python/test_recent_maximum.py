"""The maximum that /metrics shows of recent gaps."""

from kvanta.server.jobs.metrics import RecentMaximum


def test_a_maximum_is_remembered_for_one_or_two_periods() -> None:
    recent = RecentMaximum(period_s=30)
    assert recent.value(1000) == 0
    recent.observe(2.0, 1001)
    recent.observe(1.0, 1002)
    assert recent.value(1029) == 2
    recent.observe(0.5, 1031)  # a new period
    assert recent.value(1059) == 2
    assert recent.value(1062) == 0.5
    assert recent.value(1093) == 0


def test_a_silent_time_forgets_everything() -> None:
    recent = RecentMaximum(period_s=30)
    recent.observe(2.0, 1000)
    recent.observe(0.25, 1061)
    assert recent.value(1061) == 0.25
