rule extract_hidden_states:
    input:
        environment=environment("model"),
        script=script("extract_hidden_states"),
        target="results/target/manifest.json",
        responses="results/responses/shard-{shard}.parquet",
    output:
        states="results/hidden_states/shard-{shard}.safetensors",
        manifest="results/hidden_states/shard-{shard}.manifest.json",
    log:
        "logs/extract_hidden_states/shard-{shard}.log",
    benchmark:
        "logs/extract_hidden_states/shard-{shard}.tsv"
    priority: PREPARING
    conda:
        f"../envs/model-{HARDWARE}.yaml"
    threads: config["threads"]
    resources:
        gpu=gpus("extract_hidden_states"),
        machine=1,
        runtime=growing(240),
        mem_mb=growing(32000),
    params:
        python=python("model"),
        layers=LAYERS,
        batch_tokens=lookup("hidden_states/batch_tokens", within=config),
        codec=lookup("hidden_states/codec", within=config),
        device=HARDWARE,
    shell:
        "{params.python} scripts/on_gpus.py {resources.gpu} {input.script[0]}"
        " --target results/target --responses {input.responses}"
        " --layers {params.layers} --codec {params.codec} --batch-tokens {params.batch_tokens} --device {params.device}"
        " --threads {threads} --out {output.states} > {log} 2>&1"
