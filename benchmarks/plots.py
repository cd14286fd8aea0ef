"""Pictures as SVG texts that are the same for the same figures."""

import io
from typing import Any


def pyplot() -> Any:  # Any: matplotlib's module, which has no types worth the name
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "perdure"
    from matplotlib import pyplot

    return pyplot


def svg(figure: Any) -> str:  # Any: as above
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    pyplot().close(figure)
    return out.getvalue()
