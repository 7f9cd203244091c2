"""Figure 5: goodput by batch size and length, from the controller's own formulas."""

from __future__ import annotations

from pathlib import Path

import numpy

from distillspec.files import write_csv, write_png
from distillspec.recipes.smartspec.claims import Claim
from distillspec.serving.costs.chain_batch import ChainBatch
from distillspec.serving.simulation import load_hardware

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LENGTHS = tuple(range(9))
ALPHAS = (0.5, 0.7, 0.9)
CONTEXT = 192  # tokens: a prompt of 128 and half an answer of 128


def surface(alpha: float) -> numpy.ndarray:
    """Return the goodput in tokens a second, `[batch, length]`."""
    latency = load_hardware("a100-7b").latency
    rows = []
    for batch in BATCHES:
        survival = numpy.tile(numpy.cumprod(numpy.full(max(LENGTHS), alpha)), (batch, 1))
        limits, contexts = numpy.full(batch, max(LENGTHS)), numpy.full(batch, CONTEXT)
        chains = ChainBatch(survival, limits, contexts, latency)
        rows.append([estimate.goodput for estimate in chains.expected(chains.alike)])
    return numpy.array(rows)


def write_surface(folder: Path) -> list[Claim]:
    """Write `fig05.csv` and `fig05.png`. Return the paper's claims about them."""
    surfaces = {alpha: surface(alpha) for alpha in ALPHAS}
    rows = (
        [alpha, batch, *(f"{value:.1f}" for value in row)]
        for alpha, goodput in surfaces.items()
        for batch, row in zip(BATCHES, goodput, strict=True)
    )
    write_csv(folder / "fig05.csv", ["alpha", "batch", *(f"k={k}" for k in LENGTHS)], rows)
    _draw(surfaces, folder / "fig05.png")
    best = {alpha: goodput.argmax(1).tolist() for alpha, goodput in surfaces.items()}
    seen = "; ".join(f"α {alpha}: {best[alpha]}" for alpha in ALPHAS)
    return [
        Claim(
            "fig05",
            "the best length is more than 4 for small batches",
            f"by batch {list(BATCHES)}: {seen}",
            best[0.9][0] > 4,
        ),
        Claim(
            "fig05",
            "and falls to 0 for large ones",
            f"at batch {BATCHES[-1]}: {[best[alpha][-1] for alpha in ALPHAS]}",
            best[0.7][-1] == 0,
        ),
    ]


def _draw(surfaces: dict[float, numpy.ndarray], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), dpi=70, layout="constrained")
    for axes, (alpha, goodput) in zip(figure.subplots(1, len(surfaces)), surfaces.items(), strict=True):
        image = axes.imshow(goodput / goodput[:, :1], aspect="auto", cmap="RdYlGn", vmin=0.4, vmax=1.6, origin="lower")
        axes.plot(goodput.argmax(1), range(len(BATCHES)), "k.-")
        axes.set(title=f"α {alpha}", xlabel="length k")
        axes.set_yticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
    figure.supylabel("batch")
    figure.colorbar(image, ax=figure.axes, label="goodput over k = 0")
    write_png(path, figure)
