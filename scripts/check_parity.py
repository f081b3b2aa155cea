"""Compare the hidden states that an engine captures for a drafter with those of transformers, layer by layer.

    check_parity.py --target results/target --responses results/responses/shard-000000.parquet --engine vllm \\
        --hidden-states results/hidden_states/shard-000000.safetensors --out results/parity/vllm.json

Loads the target twice with transformers (bfloat16 and float32, on the first sequences of the shard) and once with the
engine, in whose environment it runs. Exit code 1 where the engine captures another layer than the one that is claimed.
"""

import json
import tempfile
from pathlib import Path

import torch

from breakeven import artefacts, cli, engines, hidden_states, parity, shard_file, tables, target
from breakeven.conventions import layers_option


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    parser.add_argument("--responses", required=True, type=Path, help="one shard of responses")
    parser.add_argument("--hidden-states", type=Path, help="the same shard's stored hidden states, compared too")
    parser.add_argument("--layers", default="default", help="as for extract_hidden_states.py")
    parser.add_argument("--engine", required=True, choices=engines.ENGINES, help="the engine to compare")
    parser.add_argument("--settings", default={}, type=json.loads, help="engine arguments as JSON")
    parser.add_argument("--environment", default={}, type=json.loads, help="environment variables as JSON")
    parser.add_argument("--sequences", type=int, default=4, help="how many sequences of the shard")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of transformers; 0 leaves torch's choice")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write; the table goes to standard output")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    engine = engines.engine(args.engine)
    engines.prepare(engine, args.device, args.environment)
    config = target.text_config(args.target)
    layers = layers_option(args.layers, config["num_hidden_layers"])
    rows = artefacts.read_table(args.responses, tables.RESPONSES).slice(0, args.sequences)
    prompts, responses = rows["prompt_token_ids"].to_pylist(), rows["response_token_ids"].to_pylist()
    sequences = [p + r for p, r in zip(prompts, responses, strict=True)]

    stored = None
    if args.hidden_states:
        shard = hidden_states.Sequences([args.hidden_states])
        if shard.layers != layers:
            raise cli.UserError(f"{args.hidden_states}: it holds layers {shard.layers}, not {layers}; extract it again")
        loaded = [shard.load(i, "token_ids", "hidden") for i in range(len(sequences))]
        if [part["token_ids"].tolist() for part in loaded] != sequences:
            raise cli.UserError(f"{args.hidden_states}: its tokens are not those of {args.responses}; extract it again")
        stored = torch.cat([part["hidden"] for part in loaded])
    # Before the engine starts, which takes most of a GPU's memory.
    known = parity.reference(args.target, sequences, args.device)
    exact = parity.reference(args.target, sequences, args.device, "float32")
    if args.device == "cuda":
        torch.cuda.empty_cache()
    if hasattr(engine, "extract"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "shard")
            made = shard_file.extract(engine, args.target, layers, prompts, responses, path, "bfloat16", args.settings)
            captured = made["hidden"].clone()
    else:
        captured = engine.capture(str(args.target), sequences, layers, config, args.settings)

    found = parity.compare(captured, layers, known, exact, stored)
    print(parity.table(found), flush=True)
    versions = engines.versions(args.engine)
    parity.refuse_other_layers(found, f"{args.engine} {versions[args.engine]}")
    artefacts.write_json(
        args.out, {"engine": args.engine, "versions": versions, "tokens": len(captured), "layers": found}
    )


if __name__ == "__main__":
    cli.run(main)
