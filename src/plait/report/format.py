"""Numbers as people read them. A non-breaking space stands before every unit. No torch."""

from __future__ import annotations

SPACE = "\u00a0"
MINUS = "\u2212"


def count(number: float) -> str:
    """1234 -> 1,234; 3_600_000 -> 3.6 M"""
    if abs(number) < 10_000:
        return f"{number:,.0f}"
    return _scaled(number, 1000, ("", "K", "M", "B", "T"))


def flops(number: float) -> str:
    return _scaled(number, 1000, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def size(number: float) -> str:
    """Bytes, in powers of 1024."""
    return _scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while abs(number) >= base - 0.5 and power < len(units) - 1:
        number, power = number / base, power + 1
    digits = 0 if abs(number) >= 100 or power == 0 else 1 if abs(number) >= 10 else 2
    text = f"{number:,.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return f"{text}{SPACE}{units[power]}".rstrip(SPACE)


def context(tokens: int) -> str:
    """A context length, in powers of 1024: 32768 -> 32K"""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return f"{tokens:,}"


def loss(value: float) -> str:
    return f"{value:.4g}"


def score(value: float) -> str:
    """Logits, to two places."""
    text = f"{abs(value):.2f}"
    return f"{MINUS}{text}" if value < 0 and float(text) else text


def percent(share: float) -> str:
    """0.985 -> 98.5%; a share just below 1 does not read 100%."""
    if 0.9995 <= share < 1:
        return f"{min(100 * share, 99.999):.3f}%"
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def duration(seconds: float) -> str:
    """Two units: 3725 -> 1 h 2 min"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,}{SPACE}h {minutes}{SPACE}min"
    return f"{minutes}{SPACE}min {rest}{SPACE}s" if minutes else f"{rest}{SPACE}s"


def listing(words: list[str]) -> str:
    """a, b and c"""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def plural(number: int, noun: str) -> str:
    """3, layer -> three layers; figures from ten on"""
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return f"{words[number] if number < len(words) else f'{number:,}'} {noun}" + ("" if number == 1 else "s")
