rule environment:
    input:
        lock="envs/{name}.lock",
        script="scripts/build_environment.py",
    output:
        ready=".envs/{name}/ready.txt",
    log:
        "logs/environment/{name}.log",
    wildcard_constraints:
        name="|".join(ENVIRONMENTS),
    localrule: True
    conda:
        "../envs/workflow.yaml"
    shell:
        "python3 {input.script} --lock {input.lock} --out {output.ready} > {log} 2>&1"
