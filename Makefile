.DEFAULT_GOAL := help
SHELL := /bin/bash
export PYTHON EXTRAS UPGRADE SOAK_S

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: ## make .venv with the cavvy command in it; EXTRAS=aws,sim adds what these parts need
	@scripts/setup.sh user

setup-dev:
	@scripts/setup.sh dev

demo: setup ## plan eight H100 on spot; train here, lose the machine, resume, read the bill, in a minute
	@scripts/demo.sh

demo-train: setup ## the same with PyTorch, which the task installs first
	@DEMO_TASK=examples/digits/task.yaml scripts/demo.sh

demo-serve: setup ## serve requests here: cold start, scale-up, a killed replica, a canary that is rolled back, the bill
	@scripts/demo_serve.sh

demo-edge: ## train here, serve on ten devices: a broken link, a bad version that goes back, samples, a better model
	@EXTRAS=edge,onnx scripts/setup.sh && .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check "scikit-learn>=1.5"
	@scripts/demo_edge.sh

test: setup-dev ## run every test that needs no real server; ROOM=serving runs all tests of a room
	@scripts/test.sh $(if $(ROOM),--room $(ROOM)) $(ARGS)

test-changed: setup-dev ## run the tests without servers that the changes since main can break
	@scripts/test.sh --changed $(ARGS)

test-servers: setup-dev ## run the tests of real servers: Slurm, Kubernetes, Ray, PostgreSQL, SSH hosts, browsers
	@scripts/test.sh --servers $(ARGS)

test-lowest: setup-dev ## test the commands with the lowest versions that pyproject.toml permits
	@scripts/lowest.sh $(ARGS)

soak: setup-dev ## kill servers, agents and work under queued jobs for SOAK_S seconds (an hour)
	@.venv/bin/python scripts/soak.py $(ARGS)

check: setup-dev ## lint, types, import contracts
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/mypy tests/typed_user.py
	@.venv/bin/lint-imports --no-cache

scenarios: setup-dev ## run 1,000 random scenarios about deadlines and budgets (about ten minutes)
	@.venv/bin/python scripts/scenarios.py $(ARGS)

format: setup-dev ## sort imports and format the code
	@.venv/bin/ruff check --quiet --fix .
	@.venv/bin/ruff format .

coverage: setup-dev ## measure the branch coverage of the tests without servers; the page is .cache/coverage/index.html
	@scripts/test.sh --cov --cov-report=term:skip-covered --cov-report=html:.cache/coverage $(ARGS)

hooks: setup-dev ## run the checks before each commit, by pre-commit
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check pre-commit
	@.venv/bin/pre-commit install

docs: setup-dev ## write the generated reference pages again
	@.venv/bin/python scripts/docs/generate.py

site: setup-dev ## build the docs site strictly into .cache/site
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict && echo "site: .cache/site/index.html"

site-serve: setup-dev ## show the docs site on http://127.0.0.1:8000 while you write
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs serve --quiet

lock: setup-dev ## write the lock files again; UPGRADE=1 takes the newest versions
	@scripts/lock.sh

changelog: setup-dev ## show what changes/ adds to the changelog
	@.venv/bin/python scripts/release/changelog.py

dist: setup-dev ## build a release into dist: sdist, wheel, image, checksums, SBOM, notes
	@scripts/release/dist.sh

picture: setup-dev ## record the README's picture from a real run of the demo
	@.venv/bin/python scripts/docs/picture.py

bench: setup-dev ## run every benchmark and print its table
	@for file in $(filter-out benchmarks/bars.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; .venv/bin/python $$file || exit 1; done

bars: setup-dev ## measure the bars of commands, server and submissions, in one table
	@.venv/bin/python benchmarks/bars.py

clean: ## remove .venv and caches
	rm -rf .venv .cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist

.PHONY: help setup setup-dev demo demo-train demo-serve demo-edge test test-changed test-servers soak check scenarios docs picture bars bench clean
.PHONY: test-lowest format coverage hooks site site-serve lock changelog dist
