"""Print what an experiment takes before it runs, stage by stage, and refuse what cannot fit on the disk.

    plan.py --config "$(python -c 'import json, yaml; print(json.dumps(yaml.safe_load(open("config.yaml"))))')"

`snakemake plan --configfile experiments/NAME.yaml` does that for the config with its overlays. No weights are needed. What
the columns are made of stands below the table and in breakeven/budget.py.
"""

import json
from pathlib import Path

from breakeven import budget, cli


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--config", required=True, type=json.loads, help="the whole config, overlays applied, as JSON")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument(
        "--logs", type=Path, default=Path("logs"), help="folder of the logs, with Snakemake's run times"
    )
    parser.add_argument("--targets", type=Path, default=Path("resources/targets"), help="folder of described targets")
    parser.add_argument(
        "--gpus", type=int, help="GPUs that Snakemake hands out on this machine; unlimited if not given"
    )
    args = parser.parse_args()

    found = budget.survey(args.config, args.results, args.logs, args.targets)
    planned = budget.plan(args.config, found)
    free = budget.free_bytes(args.results)
    planned.notes += budget.gpu_notes(planned, args.gpus)
    planned.notes.append(f"disk: {planned.bytes() / 1e9:,.1f} GB to write, {free / 1e9:,.1f} GB free at {args.results}")
    print(budget.table(planned, args.config["hardware"]), flush=True)
    budget.check(planned, args.config, found, args.results, free)


if __name__ == "__main__":
    cli.run(main)
