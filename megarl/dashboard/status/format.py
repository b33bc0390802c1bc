"""Times and rates as text."""

from __future__ import annotations

import time

_MINUTE = 60
_HOUR = 3600
_DAY = 86400


def duration(seconds: float) -> str:
    """Returns a duration in two units at most, with a fraction below ten seconds."""
    if 0 < seconds < 9.95 and seconds != round(seconds):
        return f"{seconds:.2g} s"
    rounded = max(0, round(seconds))
    if rounded < 2 * _MINUTE:
        return f"{rounded} s"
    if rounded < 2 * _HOUR:
        return f"{rounded // _MINUTE} min"
    if rounded < 2 * _DAY:
        return f"{rounded // _HOUR} h {rounded % _HOUR // _MINUTE} min"
    return f"{rounded // _DAY} d {rounded % _DAY // _HOUR} h"


def rate(seconds_per_step: float) -> str:
    """Returns the steps per hour with three digits, or all digits before the point."""
    per_hour = _HOUR / seconds_per_step
    if per_hour >= 100:
        return f"{per_hour:,.0f}"
    return f"{per_hour:.3g}"


def clock(when: float, now: float) -> str:
    """Returns the local time, with the date unless it is today's; both times in seconds since 1970."""
    then = time.localtime(when)
    today = time.localtime(now)
    same_day = then[:3] == today[:3]
    return time.strftime("%H:%M" if same_day else "%a %d %b %H:%M", then)


def ago(when: float, now: float) -> str:
    """Returns the time since `when`; at least 0 s, as clocks of other machines may be ahead."""
    return f"{duration(round(now - when))} ago"
