rule benchmark:
    input:
        environment=environment("workflow"),
        engine=arm_environment,
        script=arm_script,
        target="results/target/manifest.json",
        prompts=arm_prompts,
        checkpoint=arm_checkpoint,
        check=arm_check,
        further=further_file,
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
        gpu=arm_gpus,
        # All of the machine: a speed is only worth something if nothing else runs beside it.
        machine=100,
        runtime=growing(120),
        mem_mb=growing(32000, arm_gpus),
    params:
        python=python("workflow"),
        engine_python=arm_python,
        arm=arm_json,
        settings=arm_settings,
        protocol=arm_protocol,
        checkpoint=arm_checkpoint_option,
        check=arm_check_option,
        further=further_option,
        hardware=HARDWARE,
    shell:
        "{params.python} {input.script[0]} --arm {params.arm:q} --pass {wildcards.number} {params.checkpoint:q}"
        " {params.check} {params.further}"
        " --engine-settings {params.settings:q} --protocol {params.protocol:q} --prompts {input.prompts:q}"
        " --engine-python {params.engine_python} --hardware {params.hardware} --target results/target"
        " --server-log {log.server} --out {output.requests} > {log[0]} 2>&1"


# Passes beyond a protocol's first ones are for arms that are not decided yet.
rule further_pass:
    input:
        environment=environment("workflow"),
        script=script("further_pass"),
        passes=earlier_passes,
    output:
        arms="results/benchmarks/{engine}-{protocol}-pass-{number}.json",
    log:
        "logs/further_pass/{engine}-{protocol}-{number}.log",
    priority: pass_priority
    conda:
        "../envs/workflow.yaml"
    resources:
        machine=1,
        runtime=growing(10),
        mem_mb=growing(4000),
    params:
        python=python("workflow"),
        arms=peers,
    shell:
        "{params.python} {input.script[0]} --benchmarks results/benchmarks --arms {params.arms}"
        " --number {wildcards.number} --out {output.arms} > {log} 2>&1"
