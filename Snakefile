# Breakeven: train an EAGLE-3 drafter, serve it, and say whether speculation pays.
#
# target ─────────────┬──────────────────────────┬────────────────────────────┐
# prompts ─▶ responses ─▶ hidden states ─▶ vocabulary ─▶ drafter ─▶ benchmark ─▶ comparison ─▶ report
#                                                           └▶ offline acceptance ──┘
#
# One rule per stage, one script per rule (scripts/), one contract per file (docs/design.md, section 3).
from snakemake.utils import min_version

min_version("9.27")


configfile: "config.yaml"


report: "report/workflow.rst"


include: "rules/common.smk"
include: "rules/environments.smk"
include: "rules/plan.smk"
include: "rules/target.smk"
include: "rules/stepcost.smk"
include: "rules/prompts.smk"
include: "rules/responses.smk"
include: "rules/hidden_states.smk"
include: "rules/vocabulary.smk"
include: "rules/published.smk"
include: "rules/drafter.smk"
include: "rules/offline.smk"
include: "rules/data_curve.smk"
include: "rules/check.smk"
include: "rules/benchmark.smk"
include: "rules/comparison.smk"
include: "rules/report.smk"


rule all:
    default_target: True
    input:
        rules.report.output.page,


rule environments:
    input:
        [environment(name) for name in ENVIRONMENTS],


onsuccess:
    show_summary()
