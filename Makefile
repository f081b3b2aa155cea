# make run: the default experiment, from nothing to results/report/index.html
# make test: everything that CI tests
PYTHON ?= python3
SHELL := /bin/bash
WORKFLOW := .envs/workflow/ready.txt

.PHONY: run test lint environment locks

run: $(WORKFLOW)
	source .envs/workflow/bin/activate && snakemake

test: $(WORKFLOW)
	source .envs/workflow/bin/activate && bash tests/run

lint: $(WORKFLOW)
	source .envs/workflow/bin/activate && bash tests/lint

environment: $(WORKFLOW)

$(WORKFLOW): envs/workflow.lock scripts/build_environment.py
	$(PYTHON) scripts/build_environment.py --lock envs/workflow.lock --out $@

locks:
	bash envs/lock.sh
