rule curate_prompts:
    input:
        environment=environment("workflow"),
        script=script("curate_prompts"),
        target="results/target/manifest.json",
        benchmark=BENCHMARK_PROMPTS,
        sources=configuration.source_files(config),
    output:
        pool="results/prompts/pool.parquet",
        rejected="results/prompts/rejected.parquet",
        manifest="results/prompts/pool.manifest.json",
    log:
        "logs/curate_prompts.log",
    priority: PREPARING
    conda:
        "../envs/workflow.yaml"
    resources:
        machine=1,
        runtime=growing(120),
        mem_mb=growing(16000),
    params:
        python=python("workflow"),
        sources=as_json(config["prompts"]["sources"]),
        seed=lookup("prompts/seed", within=config),
        languages=lookup("prompts/languages", within=config),
        min_tokens=lookup("prompts/min_tokens", within=config),
        max_tokens=lookup("prompts/max_tokens", within=config),
        threshold=lookup("prompts/near_duplicate_threshold", within=config),
        held_out=lookup("prompts/held_out_fraction", within=config),
    shell:
        "{params.python} {input.script[0]} --target results/target --sources {params.sources:q}"
        " --benchmark-prompts {input.benchmark:q} --seed {params.seed}"
        " --languages {params.languages:q} --min-tokens {params.min_tokens} --max-tokens {params.max_tokens}"
        " --near-duplicate-threshold {params.threshold} --held-out-fraction {params.held_out}"
        " --cache results/cache --out {output.pool} --rejected {output.rejected} > {log} 2>&1"


rule select_prompts:
    input:
        environment=environment("workflow"),
        script=script("select_prompts"),
        pool="results/prompts/pool.parquet",
        target="results/target/manifest.json",
    output:
        selection="results/prompts/selection.json",
    log:
        "logs/select_prompts.log",
    # Small, and it refuses what cannot work: before any long job.
    priority: PREPARING + 1
    conda:
        "../envs/workflow.yaml"
    resources:
        machine=1,
        runtime=growing(10),
        mem_mb=growing(4000),
    params:
        python=python("workflow"),
        size=lookup("prompts/size", within=config),
        samples=lookup("responses/samples_per_prompt", within=config),
        most_samples=most_samples_option,
        max_tokens=lookup("responses/sampling/max_tokens", within=config),
        layers=LAYERS,
        codec=STORED_CODEC,
    shell:
        "{params.python} {input.script[0]} --pool {input.pool} --target results/target --size {params.size}"
        " --samples-per-prompt {params.samples} {params.most_samples} --max-tokens {params.max_tokens} --layers {params.layers}"
        " --codec {params.codec} --hidden-states results/hidden_states --out {output.selection} > {log} 2>&1"
