rule fetch_target:
    input:
        environment=environment("model"),
        script=script("fetch_target"),
        files=configuration.target_files(config),
    output:
        manifest="results/target/manifest.json",
    log:
        "logs/fetch_target.log",
    priority: PREPARING
    conda:
        f"../envs/model-{HARDWARE}.yaml"
    resources:
        machine=1,
        runtime=growing(120),
        mem_mb=growing(16000),
    params:
        python=python("model"),
        source=as_json(config["target"]),
        folder=subpath(output.manifest, parent=True),
    shell:
        "{params.python} {input.script[0]} --source {params.source:q} --out {params.folder}"
        " --cache results/cache > {log} 2>&1"
