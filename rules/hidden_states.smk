rule extract_hidden_states:
    input:
        environment=environment(STATES_ENVIRONMENT),
        script=script(
            "extract_hidden_states",
            *(
                []
                if STATES_ENGINE == "transformers"
                else engine_modules(STATES_ENGINE)
            ),
        ),
        target="results/target/manifest.json",
        responses=shard_file("responses", "shard-{shard}.parquet"),
    output:
        states=shard_file("hidden_states", "shard-{shard}.safetensors"),
        manifest=shard_file("hidden_states", "shard-{shard}.manifest.json"),
    log:
        "logs/extract_hidden_states/shard-{shard}.log",
    benchmark:
        "logs/extract_hidden_states/shard-{shard}.tsv"
    priority: PREPARING
    conda:
        f"../envs/{flavour(STATES_ENVIRONMENT)}.yaml"
    threads: config["threads"]
    resources:
        gpu=states_gpus,
        machine=1,
        runtime=growing(240),
        mem_mb=growing(32000, states_gpus),
    params:
        python=python(STATES_ENVIRONMENT),
        engine=STATES_ENGINE,
        settings=states_settings("settings"),
        environment=states_settings("environment"),
        layers=LAYERS,
        batch_tokens=lookup("hidden_states/batch_tokens", within=config),
        codec=lookup("hidden_states/codec", within=config),
        device=HARDWARE,
    shell:
        "{params.python} scripts/on_gpus.py {resources.gpu} {input.script[0]}"
        " --target results/target --responses {input.responses:q}"
        " --engine {params.engine} --settings {params.settings:q} --environment {params.environment:q}"
        " --layers {params.layers} --codec {params.codec} --batch-tokens {params.batch_tokens} --device {params.device}"
        " --threads {threads} --out {output.states:q} > {log} 2>&1"


# Before a drafter is trained (hidden_states.check_parity): each engine that will serve it captures the layers it is trained on.
rule check_parity:
    input:
        environment=lambda wildcards: environment(wildcards.engine),
        script=lambda wildcards: script(
            "check_parity", *engine_modules(wildcards.engine)
        ),
        target="results/target/manifest.json",
        responses=shards("responses", "parquet")[0],
        states=parity_states(),
    output:
        table="results/parity/{engine}.json",
    log:
        "logs/check_parity/{engine}.log",
    priority: PREPARING
    conda:
        "../envs/{engine}-%s.yaml" % HARDWARE
    threads: config["threads"]
    resources:
        gpu=parity_gpus,
        machine=1,
        runtime=growing(120),
        mem_mb=growing(32000, parity_gpus),
    params:
        python=lambda wildcards: python(wildcards.engine),
        settings=lambda wildcards: response_settings("settings", wildcards.engine),
        environment=lambda wildcards: response_settings("environment", wildcards.engine),
        layers=LAYERS,
        states=parity_states_option(),
        device=HARDWARE,
    shell:
        "{params.python} scripts/on_gpus.py {resources.gpu} {input.script[0]}"
        " --target results/target --responses {input.responses:q} {params.states} {input.states:q}"
        " --engine {wildcards.engine} --settings {params.settings:q} --environment {params.environment:q}"
        " --layers {params.layers} --device {params.device} --threads {threads} --out {output.table} > {log} 2>&1"
