rule random_drafter:
    input:
        environment=environment("model"),
        script=script("random_drafter"),
        target="results/target/manifest.json",
    output:
        manifest="results/stepcost/drafter/manifest.json",
        config="results/stepcost/drafter/config.json",
        weights="results/stepcost/drafter/model.safetensors",
    log:
        "logs/random_drafter.log",
    priority: PREPARING
    conda:
        f"../envs/model-{HARDWARE}.yaml"
    resources:
        machine=1,
        runtime=growing(10),
        mem_mb=growing(8000),
    params:
        python=python("model"),
        vocabulary=step_cost_vocabulary_option(),
        folder=subpath(output.manifest, parent=True),
    shell:
        "{params.python} {input.script[0]} --target results/target {params.vocabulary}"
        " --out {params.folder} > {log} 2>&1"


rule measure_step_cost:
    input:
        environment=environment("workflow"),
        engine=lambda wildcards: environment(wildcards.engine),
        script=lambda wildcards: script("step_cost", *engine_files(wildcards.engine)),
        target="results/target/manifest.json",
        drafter="results/stepcost/drafter/manifest.json",
    output:
        table="results/stepcost/{engine}.parquet",
        manifest="results/stepcost/{engine}.manifest.json",
        text="results/stepcost/{engine}.txt",
    log:
        "logs/step_cost/{engine}.log",
    conda:
        "../envs/workflow.yaml"
    threads: config["threads"]
    resources:
        gpu=engine_gpus,
        # All of the machine: a speed is only worth something if nothing else runs beside it.
        machine=100,
        runtime=growing(240),
        mem_mb=growing(32000, engine_gpus),
    params:
        python=python("workflow"),
        engine_python=lambda wildcards: python(wildcards.engine),
        engine_settings=lambda wildcards: engine_settings(wildcards.engine),
        settings=step_cost_settings(),
        hardware=HARDWARE,
        logs="logs/step_cost/{engine}",
    shell:
        "{params.python} {input.script[0]} --engine {wildcards.engine} --engine-settings {params.engine_settings:q}"
        " --engine-python {params.engine_python} --settings {params.settings:q} --hardware {params.hardware}"
        " --target results/target --checkpoint results/stepcost/drafter --server-log {params.logs}"
        " --out {output.table} > {log} 2>&1"


# Break-even before any data: measures what is not measured yet, and prints what it means.
rule step_cost:
    input:
        expand("results/stepcost/{engine}.txt", engine=ENGINES),
    log:
        "logs/step_cost.log",
    localrule: True
    conda:
        "../envs/workflow.yaml"
    shell:
        "cat {input} | tee {log}"
