"""Quantities as operators write them: 30s, 600W, 5%, ">= 100 tok/s", "3 per 1h"."""

import re

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def whole_number(text: str) -> int | None:
    """Of at most 18 ASCII digits, which any 64-bit field holds; None for all else. int() itself takes digits of every
    script, and raises ValueError past a few thousand of them: whoever chooses the text would choose where it raises.
    """
    return int(text) if len(text) <= 18 and text.isascii() and text.isdigit() else None


def parse_duration(value: object) -> float:
    """Seconds from "90s", "30m", "1h30m"; a bare number is refused because its unit would be a guess."""
    if isinstance(value, str):
        parts = _DURATION.findall(value)
        if parts and re.fullmatch(rf"(?:\s*{_DURATION.pattern})+\s*", value):
            return float(sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts))
    raise ValueError('expected a duration with its unit, such as "30s", "5m" or "1h30m"')


def parse_watts(value: object) -> int:
    """Watts from "600W"."""
    match = re.fullmatch(r"\s*(\d+)\s*W\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError('expected a power with its unit, such as "600W"')
    return int(match[1])


UNLOCKED = (0, 0)  # a range of clocks that locks nothing


def parse_clocks(value: object) -> tuple[int, int]:
    """MHz, lowest and highest, from "300-2000MHz" or "1500MHz"; ``UNLOCKED`` from "unlocked"."""
    if value == "unlocked":
        return UNLOCKED
    match = (
        re.fullmatch(r"\s*([1-9]\d*)(?:\s*-\s*([1-9]\d*))?\s*MHz\s*", value)
        if isinstance(value, str)
        else None
    )
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise ValueError(
            'expected clocks with their unit, lowest first, such as "300-2000MHz", or "unlocked"'
        )
    return int(match[1]), int(match[2] or match[1])


def say_clocks(clocks: tuple[int, int]) -> str:
    low, high = clocks
    if clocks == UNLOCKED:
        return "unlocked"
    return f"{low}MHz" if low == high else f"{low}-{high}MHz"


def parse_percent(value: object) -> float:
    """A fraction from "5%"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError('expected a percentage, such as "5%"')
    return float(match[1]) / 100.0


def parse_floor(value: object) -> float:
    """Tokens per second from ">= 100 tok/s"."""
    match = re.fullmatch(r"\s*>=\s*(\d+(?:\.\d+)?)\s*tok/s\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError('expected a floor, such as ">= 100 tok/s"')
    return float(match[1])


def parse_rate(value: object) -> tuple[int, float]:
    """A count and its window in seconds from "3 per 1h"."""
    match = re.fullmatch(r"\s*(\d+)\s+per\s+(\S+)\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError('expected a rate, such as "3 per 1h"')
    return int(match[1]), parse_duration(match[2])


def say_duration(seconds: float) -> str:
    """Seconds in words short enough for one line: 0.4s, 12s, 3m, 2h5m, 4d."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60}s" if whole % 60 else f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60}m" if whole % 3600 // 60 else f"{whole // 3600}h"
    return f"{whole // 86400}d"
