# Drafters that others published, at a pinned revision; a given folder is used where it lies.
rule fetch_drafter:
    input:
        environment=environment("model"),
        script=script("fetch_drafter"),
        files=published_files,
    output:
        manifest="results/published/{published}/manifest.json",
    log:
        "logs/fetch_drafter/{published}.log",
    priority: PREPARING
    conda:
        f"../envs/model-{HARDWARE}.yaml"
    resources:
        machine=1,
        runtime=growing(60),
        mem_mb=growing(16000),
    params:
        python=python("model"),
        source=lambda wildcards: as_json(
            config["drafters"][wildcards.published]["checkpoint"]
        ),
        folder=lambda wildcards: checkpoint_folder(wildcards.published),
    shell:
        "{params.python} {input.script[0]} --source {params.source:q} --out {params.folder}"
        " --manifest {output.manifest} > {log} 2>&1"
