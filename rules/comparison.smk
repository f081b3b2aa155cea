rule compare:
    input:
        environment=environment("workflow"),
        script=script("compare"),
        passes=[path for arm in config["arms"] for path in benchmark_passes(arm)],
        offline=[path for paths in offline_tables().values() for path in paths],
        what_if=what_if_files(),
        walk_manifests=walk_manifests(),
        drafters=list(DRAFTER_MANIFESTS.values()),
        step_costs=step_cost_files(),
        expectations="resources/expectations.json",
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
        runtime=growing(30),
        mem_mb=growing(8000),
    params:
        python=python("workflow"),
        arms=list(config["arms"]),
        offline=offline_options(),
        what_if=[f"{Path(path).parent.name}={path}" for path in what_if_files()],
        drafters=[f"{name}={path}" for name, path in DRAFTER_MANIFESTS.items()],
        step_costs=[f"{Path(path).stem}={path}" for path in step_cost_files()],
        passes=passes_options(),
    shell:
        "{params.python} {input.script[0]} --benchmarks results/benchmarks --arms {params.arms}"
        " --offline {params.offline} --passes {params.passes}"
        " --what-if {params.what_if} --drafter {params.drafters} --stepcost {params.step_costs}"
        " --expectations {input.expectations} --out {output.summary} --acceptance {output.acceptance}"
        " --requests {output.requests} > {log} 2>&1"
