# What the experiment takes before it runs; it has no output, so it is asked for by name and always runs.
rule plan:
    input:
        environment=environment("workflow"),
        script=script("plan"),
    log:
        "logs/plan.log",
    # What does not fit is refused once, whatever the profile retries.
    retries: 0
    localrule: True
    conda:
        "../envs/workflow.yaml"
    params:
        python=python("workflow"),
        config=as_json(config),
        gpus=gpus_option(),
    shell:
        "{params.python} {input.script[0]} --config {params.config:q} --results results --logs logs"
        " --targets resources/targets {params.gpus} 2>&1 | tee {log}"
