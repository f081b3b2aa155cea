"""What more training data would do: a saturating law through drafters trained on nested sets of samples.

    data_curve.py --drafter own --k 3 5 --points 10000=results/drafters/own-10000/offline_by_sequence.parquet \\
        20000=... 44000=... 88000=... --stepcost vllm=results/stepcost/vllm.parquet --out results/data_curve/curve.parquet

Writes the table, a figure, and beside the table a .txt with what they mean: the law, the forecast for twice the data,
and whether more data crosses break-even. Step costs and the comparison are optional.
"""

from pathlib import Path

import pandas as pd

from breakeven import artefacts, cli, scaling, tables
from breakeven.options import pairs


def chains(path: Path) -> pd.DataFrame:
    """The rows of a comparison's summary whose arms draft a plain chain.

    An arm with further options of its engine, a tree say, has the same drafter and K and accepts and costs something else.
    """
    rows = artefacts.read_table(path, tables.SUMMARY).to_pandas()
    arms = artefacts.read_manifest(artefacts.manifest_path(path), "comparison")["arms"]
    return rows[[not (arms.get(name) or {}).get("options") for name in rows["arm"]]]


def main() -> None:
    parser = cli.parser(__doc__)
    add = parser.add_argument
    add("--drafter", required=True, help="name of the drafter; point N is called NAME-N")
    add("--points", required=True, nargs="+", help="N=FILE, counts of each held-out sequence")
    add("--k", required=True, nargs="+", type=int, help="drafted tokens per step; a curve for each")
    add("--stepcost", nargs="*", default=[], help="ENGINE=FILE, as step_cost.py writes them")
    add("--summary", type=Path, help="summary.parquet of a comparison: served acceptance, and rho of measured arms")
    add("--style", type=Path, required=True, help="style of the figure")
    add("--figure", type=Path, help="SVG file to write; beside --out if not given")
    add("--out", required=True, type=Path, help="Parquet file to write")
    args = parser.parse_args()

    points, files, step_costs = {}, pairs("--points", args.points), pairs("--stepcost", args.stepcost)
    for samples, path in files.items():
        if not samples.isdecimal():
            raise cli.UserError(f"--points {samples}={path}: {samples!r} is no number of samples")
        points[int(samples)] = artefacts.read_table(path, tables.OFFLINE_BY_SEQUENCE).to_pandas()
    names = [args.drafter, *(f"{args.drafter}-{n}" for n in points)]
    measured = {engine: artefacts.read_table(path, tables.STEP_COST).to_pandas() for engine, path in step_costs.items()}
    summary = chains(args.summary) if args.summary else None
    served = {}
    if summary is not None:
        mine = summary[summary["drafter"].isin(names) & summary["acceptance_length"].notna()]
        served = {(row.drafter, row.k): row.acceptance_length for row in mine.itertuples()}

    curves = [scaling.curve(points, k) for k in args.k]
    costs = scaling.step_costs(measured, summary, names)
    rows = [row for curve in curves for row in scaling.rows(curve, args.drafter, served)]
    text = scaling.summary(curves, rows, costs)
    scaling.draw(curves, costs, args.figure or args.out.with_suffix(".svg"), args.style)
    artefacts.write_table(args.out, rows, tables.DATA_CURVE)
    with artefacts.atomic(args.out.with_suffix(".txt")) as temporary:
        temporary.write_text(text)
    inputs = {f"point {n}": path for n, path in files.items()}
    inputs |= {f"step cost {name}": path for name, path in step_costs.items()}
    artefacts.write_manifest(
        artefacts.manifest_path(args.out),
        "data_curve",
        parameters={"drafter": args.drafter, "samples": sorted(points), "k": args.k},
        inputs=inputs | ({"comparison": args.summary} if args.summary else {}),
        counts={"conversations": curves[0].conversations},
        step_costs={engine: {"source": cost.source, "rho": cost.known()} for engine, cost in costs.items()},
        files=artefacts.hashes(args.out),
    )
    cli.logger.info("\n%s", text)


if __name__ == "__main__":
    cli.run(main)
