# Everything runs in .venv, which `make setup` makes. `make demo` and `make test` need nothing beforehand.
PY := .venv/bin/python
PROTOS := protos/tidelane/rpc

.PHONY: setup check lint types contracts test fast-test demo bench-engine scale-test e2e protos crds images lock clean

setup:
	@tools/setup.sh

check: setup lint types contracts fast-test  ## the everyday loop, under two minutes

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) tools/protos.py --check
	$(PY) tools/resources_doc.py --check
	$(PY) tools/chart.py --check

types: setup
	$(PY) -m mypy

contracts: setup
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

fast-test: setup
	$(PY) -m pytest -q -m "not slow and not cluster"

test: lint types contracts  ## everything, with a real API server and the real model
	$(PY) tools/kube/build.py >/dev/null
	$(PY) tools/kube/build.py helm gitops-health >/dev/null
	$(PY) -m tidelane.cli.main model pull builtin://smollm2-135m-instruct >/dev/null
	$(PY) -m pytest

demo: setup
	$(PY) tools/demo.py

bench-engine: setup
	$(PY) -m tidelane.engine.bench.engine

scale-test: setup  ## not part of `make test`: 500 simulated agents, 1,000 services, a few minutes
	PYTHONPATH=tests $(PY) -m scale

e2e: setup  ## not part of `make test`: a kubelet and real pods; root, Debian 12, no Docker; long the first time
	$(PY) -m tidelane.cli.main model pull builtin://smollm2-135m-instruct >/dev/null
	$(PY) -m pytest -x -m pods tests/pods

protos: setup
	$(PY) tools/protos.py

crds: setup
	$(PY) tools/resources_doc.py
	$(PY) tools/chart.py

images: setup  ## the operator's image, as an archive in dist/
	tools/images/operator.sh

lock:
	python3.11 -m venv .lock-venv && .lock-venv/bin/pip install -q pip-tools
	.lock-venv/bin/pip-compile -q --allow-unsafe --strip-extras --generate-hashes --all-extras --no-emit-index-url \
		--no-emit-find-links --no-header -o requirements.lock pyproject.toml
	rm -rf .lock-venv

clean:
	rm -rf .venv dist build .mypy_cache .pytest_cache .ruff_cache
