rule report:
    input:
        environment=environment("workflow"),
        script=script("report"),
        comparison="results/comparison/summary.parquet",
        tables=[
            "results/comparison/acceptance.parquet",
            "results/comparison/requests.parquet",
            "results/comparison/summary.manifest.json",
        ],
        manifests=manifests(),
        locks=[f"envs/{name}.lock" for name in ENVIRONMENTS],
        training=[option.partition("=")[2] for option in training_options()],
        held_out=offline_tables()["held_out"],
        step_costs=step_cost_files(),
        template="report/comparison.html.j2",
        parts=["report/page.css", "report/page.js"],
        # Snakemake does not track captions by itself.
        captions=[
            f"report/{name}.rst"
            for name in (
                "workflow",
                "comparison",
                "speedups",
                "acceptance",
                "lengths",
                "prompts",
                "step_cost",
                "load",
                "training",
                "summary_table",
                "pay_table",
                "acceptance_table",
                "requests_table",
            )
        ],
        style="report/style.mplstyle",
        reference="resources/reference-case.json",
    output:
        page=report(
            "results/report/index.html",
            caption="../report/comparison.rst",
            category="1 Verdict",
            labels={"what": "the page", "kind": "page"},
        ),
        summary=report(
            "results/report/summary.csv",
            caption="../report/summary_table.rst",
            category="1 Verdict",
            labels={"what": "all arms", "kind": "table"},
        ),
        speedups=report(
            "results/report/speedups.svg",
            caption="../report/speedups.rst",
            category="1 Verdict",
            labels={"what": "speed-up against break-even", "kind": "figure"},
        ),
        pay=report(
            "results/report/what_would_pay.csv",
            caption="../report/pay_table.rst",
            category="1 Verdict",
            labels={"what": "what would make it pay", "kind": "table"},
        ),
        acceptance=report(
            "results/report/acceptance.svg",
            caption="../report/acceptance.rst",
            category="2 Acceptance",
            labels={"what": "acceptance per position", "kind": "figure"},
        ),
        acceptance_table=report(
            "results/report/acceptance.csv",
            caption="../report/acceptance_table.rst",
            category="2 Acceptance",
            labels={"what": "acceptance per position", "kind": "table"},
        ),
        lengths=report(
            "results/report/lengths.svg",
            caption="../report/lengths.rst",
            category="2 Acceptance",
            labels={"what": "acceptance length against K", "kind": "figure"},
        ),
        training=report(
            "results/report/training.svg",
            caption="../report/training.rst",
            category="2 Acceptance",
            labels={"what": "training", "kind": "figure"},
        ),
        step_cost=report(
            "results/report/step_cost.svg",
            caption="../report/step_cost.rst",
            category="3 Cost",
            labels={"what": "cost of a step", "kind": "figure"},
        ),
        load=report(
            "results/report/load.svg",
            caption="../report/load.rst",
            category="3 Cost",
            labels={"what": "speed-up under load", "kind": "figure"},
        ),
        prompts=report(
            "results/report/prompts.svg",
            caption="../report/prompts.rst",
            category="4 Prompts",
            labels={"what": "speed of each prompt", "kind": "figure"},
        ),
        requests=report(
            "results/report/requests.csv",
            caption="../report/requests_table.rst",
            category="4 Prompts",
            labels={"what": "every request", "kind": "table"},
        ),
    log:
        "logs/report.log",
    conda:
        "../envs/workflow.yaml"
    resources:
        machine=1,
        runtime=growing(30),
        mem_mb=growing(8000),
    params:
        python=python("workflow"),
        training=training_options(),
        held_out=held_out_options(),
        data_curve=data_curve_option(),
        data_curve_content=data_curve_content(),
    shell:
        "{params.python} {input.script[0]} --comparison results/comparison --manifests {input.manifests:q}"
        " --locks {input.locks}"
        " --stepcost {input.step_costs} --training {params.training} --offline {params.held_out}"
        " {params.data_curve}"
        " --template {input.template} --style {input.style} --reference {input.reference}"
        " --out {output.page} --figures results/report > {log} 2>&1"
