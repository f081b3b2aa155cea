rule check_drafter:
    input:
        environment=environment("workflow"),
        engine=arm_environment,
        script=script("check_drafter"),
        target="results/target/manifest.json",
        checkpoint=arm_checkpoint,
    output:
        findings="results/benchmarks/{arm}/check.json",
    log:
        "logs/check_drafter/{arm}.log",
    # Seconds; an arm whose drafter would be served silently wrong is not measured, and the report says why.
    priority: PREPARING
    conda:
        "../envs/workflow.yaml"
    resources:
        machine=1,
        runtime=growing(30),
        mem_mb=growing(8000),
    params:
        python=python("workflow"),
        engine_python=arm_python,
        folder=arm_folder,
        options=check_options,
    shell:
        "{params.python} {input.script[0]} --checkpoint {params.folder:q} --target results/target"
        " --engine-python {params.engine_python} {params.options:q} --exit-zero --json {output.findings}"
        " > {log} 2>&1"
