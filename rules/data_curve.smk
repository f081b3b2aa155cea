rule fit_data_curve:
    input:
        environment=environment("workflow"),
        script=script("data_curve"),
        points=point_tables,
        summary=served_summary(),
        step_costs=step_cost_files(),
        style="report/style.mplstyle",
    output:
        table="results/data_curve/curve.parquet",
        manifest="results/data_curve/curve.manifest.json",
        figure="results/data_curve/curve.svg",
        text="results/data_curve/curve.txt",
    log:
        "logs/data_curve/fit.log",
    conda:
        "../envs/workflow.yaml"
    resources:
        machine=1,
    params:
        python=python("workflow"),
        drafter=lookup("data_curve/drafter", within=config, default=""),
        k=lookup("data_curve/k", within=config, default=[]),
        points=points_options(),
        summary=[f"--summary {path}" for path in served_summary()[:1]],
        step_costs=[f"{Path(path).stem}={path}" for path in step_cost_files()],
    shell:
        "{params.python} {input.script[0]} --drafter {params.drafter} --points {params.points} --k {params.k}"
        " --stepcost {params.step_costs} {params.summary} --style {input.style} --figure {output.figure}"
        " --out {output.table} > {log} 2>&1"


# What more data would do: trains and walks the points that are not there yet, and prints what they mean.
rule data_curve:
    input:
        "results/data_curve/curve.txt",
    log:
        "logs/data_curve/print.log",
    localrule: True
    conda:
        "../envs/workflow.yaml"
    shell:
        "cat {input} | tee {log}"
