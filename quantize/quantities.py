"""Values of options that are quantities: floors, sizes in bytes and numbers of rows."""

from __future__ import annotations

import math
import re
from typing import Any

import click

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Floor(click.ParamType[float]):
    """A least value; what is no number would be a floor that says nothing."""

    name = "float"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """The number; a usage error when there is none."""
        number = float(click.FLOAT.convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number such as 15", param, ctx)
        return number


class Rows(click.ParamType[tuple[int, ...]]):
    """Numbers of rows such as ``1024,256,256``."""

    name = "rows"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """The numbers; a usage error when they cannot be read."""
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value):
            self.fail(f"{value!r} is not a list of rows such as 1024,256,256", param, ctx)
        return tuple(map(int, value.split(",")))


class Size(click.ParamType[int]):
    """A number of bytes such as ``5GB``; 1 GB = 10⁹ bytes."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """The number of bytes; a usage error when it cannot be read."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value)
        if not match or match[2].upper() not in UNITS:
            self.fail(f"{value!r} is not a size such as 5GB or 500MB", param, ctx)
        return int(float(match[1]) * UNITS[match[2].upper()])
