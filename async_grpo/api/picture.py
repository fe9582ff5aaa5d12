"""A figure that a notebook shows."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class Picture(Figure):
    """Shown without `%matplotlib inline` too, which knows those of pyplot alone."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()
