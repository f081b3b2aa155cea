rule generate_responses:
    input:
        environment=environment(RESPONSES_ENVIRONMENT),
        script=script("generate_responses", *engine_files(RESPONSES_ENGINE)),
        target="results/target/manifest.json",
        pool="results/prompts/pool.parquet",
    output:
        responses=shard_file("responses", "shard-{shard}.parquet"),
        manifest=shard_file("responses", "shard-{shard}.manifest.json"),
    log:
        "logs/generate_responses/shard-{shard}.log",
    benchmark:
        "logs/generate_responses/shard-{shard}.tsv"
    priority: PREPARING
    retries: 1
    conda:
        f"../envs/{flavour(RESPONSES_ENVIRONMENT)}.yaml"
    threads: config["threads"]
    resources:
        gpu=response_gpus,
        machine=1,
        runtime=growing(240),
        mem_mb=growing(32000, response_gpus),
    params:
        python=python(RESPONSES_ENVIRONMENT),
        shard_size=lookup("prompts/shard_size", within=config),
        engine=lookup("responses/engine", within=config),
        samples=lookup("responses/samples_per_prompt", within=config),
        sampling=as_json(config["responses"]["sampling"]),
        greedy_first="--greedy-first" if config["responses"]["greedy_first"] else "",
        settings=response_settings("settings"),
        environment=response_settings("environment"),
        endpoint=endpoint_option,
        hardware=HARDWARE,
    shell:
        "{params.python} scripts/on_gpus.py {resources.gpu} {input.script[0]}"
        " --target results/target --pool {input.pool} --start {wildcards.shard}"
        " --count {params.shard_size} --engine {params.engine} --sampling {params.sampling:q}"
        " --samples-per-prompt {params.samples} {params.greedy_first} --settings {params.settings:q}"
        " --environment {params.environment:q} {params.endpoint:q} --hardware {params.hardware}"
        " --out {output.responses:q} > {log} 2>&1"
