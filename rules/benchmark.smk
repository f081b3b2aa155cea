rule benchmark:
    input:
        environment=environment("workflow"),
        engine=arm_environment,
        script=arm_script,
        target="results/target/manifest.json",
        prompts=arm_prompts,
        checkpoint=arm_checkpoint,
        check=arm_check,
    output:
        requests="results/benchmarks/{arm}/pass-{number}.parquet",
        manifest="results/benchmarks/{arm}/pass-{number}.manifest.json",
    log:
        "logs/benchmark/{arm}/pass-{number}.log",
        server="logs/benchmark/{arm}/pass-{number}.server.log",
    priority: pass_priority
    conda:
        arm_conda
    threads: config["threads"]
    resources:
        gpu=1 if HARDWARE == "cuda" else 0,
        # All of the machine: a speed is only worth something if nothing else runs beside it.
        machine=100,
    params:
        python=python("workflow"),
        engine_python=arm_python,
        arm=arm_json,
        settings=arm_settings,
        protocol=arm_protocol,
        checkpoint=arm_checkpoint_option,
        hardware=HARDWARE,
    shell:
        "{params.python} {input.script[0]} --arm {params.arm:q} --pass {wildcards.number} {params.checkpoint}"
        " --engine-settings {params.settings:q} --protocol {params.protocol:q} --prompts {input.prompts}"
        " --engine-python {params.engine_python} --hardware {params.hardware} --target results/target"
        " --server-log {log.server} --out {output.requests} > {log[0]} 2>&1"
