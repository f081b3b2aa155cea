rule compare:
    input:
        environment=environment("workflow"),
        script=script("compare"),
        passes=[path for arm in config["arms"] for path in benchmark_passes(arm)],
        offline=[path for paths in offline_tables().values() for path in paths],
    output:
        summary="results/comparison/summary.parquet",
        acceptance="results/comparison/acceptance.parquet",
        requests="results/comparison/requests.parquet",
        manifest="results/comparison/summary.manifest.json",
    log:
        "logs/compare.log",
    conda:
        "../envs/workflow.yaml"
    resources:
        machine=1,
    params:
        python=python("workflow"),
        arms=list(config["arms"]),
        offline=offline_options(),
        passes=passes_options(),
    shell:
        "{params.python} {input.script[0]} --benchmarks results/benchmarks --arms {params.arms}"
        " --offline {params.offline} --passes {params.passes} --out {output.summary} --acceptance {output.acceptance}"
        " --requests {output.requests} > {log} 2>&1"
