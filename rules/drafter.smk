rule train_drafter:
    input:
        environment=environment("model"),
        script=script("train_drafter"),
        target="results/target/manifest.json",
        vocabulary="results/drafters/{drafter}/vocabulary.safetensors",
        sequences=sequences("data"),
        manifests=sequences("manifest.json"),
        start=start_files,
        parity=parity_files(),
    output:
        manifest="results/drafters/{drafter}/checkpoint/manifest.json",
        config="results/drafters/{drafter}/checkpoint/config.json",
        weights="results/drafters/{drafter}/checkpoint/model.safetensors",
        training="results/drafters/{drafter}/checkpoint/training.parquet",
        speed="results/drafters/{drafter}/checkpoint/speed.json",
    log:
        "logs/train_drafter/{drafter}.log",
    benchmark:
        "logs/train_drafter/{drafter}.tsv"
    priority: PREPARING
    retries: 1
    conda:
        f"../envs/model-{HARDWARE}.yaml"
    threads: drafter_threads
    resources:
        gpu=drafter_gpus,
        sharded=drafter_sharded,
        machine=1,
        runtime=growing(720),
        mem_mb=growing(32000, drafter_gpus),
    params:
        python=python("model"),
        settings=lambda wildcards: as_json(
            config["drafters"][wildcards.drafter]["settings"]
        ),
        start=start_of,
        samples=samples_option,
        sequences=training_option(),
        device=HARDWARE,
        folder=subpath(output.manifest, parent=True),
    shell:
        "{params.python} scripts/on_gpus.py {resources.gpu} {input.script[0]}"
        " --target results/target --vocabulary {input.vocabulary}"
        " {params.sequences} {input.sequences:q} --settings {params.settings:q} --initialise-from {params.start:q}"
        " {params.samples} --device {params.device} --ranks {resources.gpu} {resources.sharded} --threads {threads}"
        " --out {params.folder}"
        " > {log} 2>&1"
