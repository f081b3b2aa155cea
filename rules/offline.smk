rule evaluate_drafter:
    input:
        environment=environment("model"),
        script=script("evaluate_drafter"),
        target="results/target/manifest.json",
        checkpoint=lambda wildcards: checkpoint_files(wildcards.drafter),
        sequences=sequences("data"),
        manifests=sequences("manifest.json"),
    output:
        table="results/drafters/{drafter}/offline.parquet",
        by_sequence="results/drafters/{drafter}/offline_by_sequence.parquet",
        manifest="results/drafters/{drafter}/offline.manifest.json",
    log:
        "logs/evaluate_drafter/{drafter}.log",
    priority: PREPARING
    conda:
        f"../envs/model-{HARDWARE}.yaml"
    threads: config["threads"]
    resources:
        gpu=gpus("evaluate_drafter"),
        machine=1,
        runtime=growing(120),
        mem_mb=growing(16000),
    params:
        python=python("model"),
        checkpoint=lambda wildcards: checkpoint_folder(wildcards.drafter),
        sequences=sequences_option(),
        device=HARDWARE,
    shell:
        "{params.python} scripts/on_gpus.py {resources.gpu} {input.script[0]}"
        " --target results/target --checkpoint {params.checkpoint:q}"
        " {params.sequences} {input.sequences:q} --device {params.device} --threads {threads}"
        " --out {output.table} --by-sequence {output.by_sequence} > {log} 2>&1"


rule replay_served:
    input:
        environment=environment("model"),
        script=script("replay_served"),
        target="results/target/manifest.json",
        checkpoint=arm_checkpoint,
        served="results/benchmarks/{arm}/pass-1.parquet",
    output:
        table="results/benchmarks/{arm}/offline.parquet",
        manifest="results/benchmarks/{arm}/offline.manifest.json",
        what_if="results/benchmarks/{arm}/what_if.parquet",
        what_if_manifest="results/benchmarks/{arm}/what_if.manifest.json",
    log:
        "logs/replay_served/{arm}.log",
    conda:
        f"../envs/model-{HARDWARE}.yaml"
    threads: config["threads"]
    resources:
        gpu=gpus("replay_served"),
        machine=1,
        runtime=growing(120),
        mem_mb=growing(16000),
    params:
        python=python("model"),
        checkpoint=arm_checkpoint_option,
        k=lookup("arms/{arm}/k", within=config),
        device=HARDWARE,
    shell:
        "{params.python} scripts/on_gpus.py {resources.gpu} {input.script[0]}"
        " --target results/target {params.checkpoint:q} --served {input.served}"
        " --k {params.k} --device {params.device} --threads {threads} --out {output.table}"
        " --what-if {output.what_if} > {log} 2>&1"
