rule build_vocabulary:
    input:
        environment=environment("model"),
        script=script("build_vocabulary"),
        target="results/target/manifest.json",
        selection="results/prompts/selection.json",
        sequences=sequences("data"),
        manifests=sequences("manifest.json"),
    output:
        maps="results/drafters/{drafter}/vocabulary.safetensors",
        manifest="results/drafters/{drafter}/vocabulary.manifest.json",
    log:
        "logs/build_vocabulary/{drafter}.log",
    priority: PREPARING
    conda:
        f"../envs/model-{HARDWARE}.yaml"
    resources:
        machine=1,
        runtime=growing(60),
        mem_mb=growing(8000),
    params:
        python=python("model"),
        sequences=sequences_option(),
        size=lookup("drafters/{drafter}/vocabulary_size", within=config),
        samples=samples_option,
    shell:
        "{params.python} {input.script[0]} --target results/target {params.sequences} {input.sequences:q}"
        " --size {params.size} {params.samples} --out {output.maps} > {log} 2>&1"
