# make run: the default experiment, from nothing to results/report/index.html
# make test: everything that CI tests
# make cluster: Snakemake with the plugins for Slurm and S3
PYTHON ?= python3
SHELL := /bin/bash
WORKFLOW := .envs/workflow/ready.txt
CLUSTER := .envs/cluster/ready.txt

.PHONY: run test lint environment cluster locks

run: $(WORKFLOW)
	source .envs/workflow/bin/activate && snakemake

test: $(WORKFLOW)
	source .envs/workflow/bin/activate && bash tests/run

lint: $(WORKFLOW)
	source .envs/workflow/bin/activate && bash tests/lint

environment: $(WORKFLOW)

cluster: $(WORKFLOW) $(CLUSTER)

$(WORKFLOW) $(CLUSTER): .envs/%/ready.txt: envs/%.lock scripts/build_environment.py
	$(PYTHON) scripts/build_environment.py --lock $< --out $@

locks:
	bash envs/lock.sh
