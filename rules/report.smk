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
        template="report/comparison.html.j2",
        # Snakemake does not track captions by itself.
        captions=[
            f"report/{name}.rst"
            for name in ("workflow", "comparison", "speedups", "acceptance")
        ],
        style="report/style.mplstyle",
        reference="resources/reference-case.json",
    output:
        page=report(
            "results/report/index.html",
            caption="../report/comparison.rst",
            category="Verdict",
            labels={"page": "comparison"},
        ),
        speedups=report(
            "results/report/speedups.svg",
            caption="../report/speedups.rst",
            category="Figures",
            labels={"figure": "speed-up against break-even"},
        ),
        acceptance=report(
            "results/report/acceptance.svg",
            caption="../report/acceptance.rst",
            category="Figures",
            labels={"figure": "acceptance per position"},
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
    shell:
        "{params.python} {input.script[0]} --comparison results/comparison --manifests {input.manifests}"
        " --template {input.template} --style {input.style} --reference {input.reference}"
        " --out {output.page} --figures results/report > {log} 2>&1"
